"""The forward of a rank's layers: in a step, in one that fails, and while vLLM warms up."""

import contextlib
import logging
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput

from tests.vllm_adapter.steps import scheduled
from vllm_dymoe.config import Options
from vllm_dymoe.kernels import Activation
from vllm_dymoe.residency.routing import Phase
from vllm_dymoe.systems.base import Precision
from vllm_dymoe.transfer import TransferError
from vllm_dymoe.vllm_adapter import moe_method
from vllm_dymoe.vllm_adapter.failures import StepFailures
from vllm_dymoe.vllm_adapter.gates import Foresight
from vllm_dymoe.vllm_adapter.observers import Observation, Observer
from vllm_dymoe.vllm_adapter.report import logger
from vllm_dymoe.vllm_adapter.running import RankLayer, Running
from vllm_dymoe.vllm_adapter.step import RunningStep

LAYER = RankLayer("layers.0", 0, Activation.SILU, None)


class Runtime:
    """As much of a runtime, and of what serves its steps, as a rank looks at."""

    experts = SimpleNamespace(layers=(0,))
    system = SimpleNamespace(precision=Precision())
    decode = None
    unobserved = contextlib.nullcontext

    @property
    def serving(self):
        return self

    def begin_step(self, phase):
        pass


class FailingRuntime(Runtime):
    def __init__(self):
        self.calls = 0

    def forward(self, *_):
        self.calls += 1
        raise TransferError("the disk is on fire")


class Listener(Observer):
    """Keeps what it hears."""

    def __init__(self):
        self.heard = []

    def see(self, routing):
        self.heard.append(routing)

    def end_step(self, *_, failed):
        self.heard.append(failed)

    def forget(self, step):
        self.heard.append(f"forget {step}")


def running(runtime):
    step = RunningStep()
    foresight = Foresight(Options(system="on-demand"))
    return Running(runtime, step, StepFailures(step), foresight, Observation(), lambda path: None)


def forward(rank, rows=3):
    x = torch.full((rows, 8), torch.nan)
    return rank.forward(LAYER, x, x, torch.zeros_like(x).int())


def test_a_layer_that_fails_gives_zeros_and_the_layers_behind_it_do_no_work_and_are_not_heard_of():
    runtime, listener = FailingRuntime(), Listener()
    rank = running(runtime)
    rank.observation.join(listener)
    for number in range(1, 3):
        assert rank.begin_step(scheduled(3))
        for _ in range(3):
            assert torch.equal(forward(rank), torch.zeros(3, 8))
        assert runtime.calls == number
        assert rank.failures.sentence == "vllm-dymoe: the disk is on fire"
        output = rank.end_model(None, scheduled(3), ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}))
        assert output.failure == "vllm-dymoe: the disk is on fire"
        assert rank.step.warming_up
        _, *ended = listener.heard
        assert ended == [True, f"forget {number}"]
        listener.heard.clear()


def test_a_warm_up_decides_nothing_and_nobody_sees_it_before_and_between_requests():
    """Its inputs are whatever was in the memory before."""
    told = []

    class Told(Runtime):
        def forward(self, routing, activation):
            told.append("computed")
            return routing.x

        @contextlib.contextmanager
        def unobserved(self):
            told.append("unobserved")
            yield

    class Tells(Observer):
        def see(self, routing):
            told.append("heard")

    rank = running(Told())
    rank.observation.join(Tells())
    for warming_up in (True, False, True):
        if not warming_up:
            rank.begin_step(scheduled(3))
        forward(rank)
        rank.step.end()
    assert told == ["unobserved", "computed", "heard", "computed", "unobserved", "computed"]


def test_a_fault_while_vllm_warms_up_ends_the_start_unless_other_ranks_wait(caplog, monkeypatch):
    rank = running(FailingRuntime())
    with pytest.raises(TransferError, match="on fire"):
        forward(rank)
    rank.failures = StepFailures(rank.step, object())
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(logger, "propagate", True)
    assert torch.equal(forward(rank), torch.zeros(3, 8))
    assert set(caplog.messages) == {"vllm-dymoe: the disk is on fire"}
    rank.begin_step(scheduled(3))
    assert rank.failures.sentence is None, "no request has failed"


def test_observers_and_the_runtime_get_the_same_object_and_whoever_leaves_hears_no_more():
    given = []

    class Given(Runtime):
        def forward(self, routing, activation):
            given.append(routing)
            return routing.x

    rank, first, second = running(Given()), Listener(), Listener()
    rank.observation.join(first)
    rank.observation.join(second)
    rank.begin_step(scheduled(3))
    forward(rank, rows=8)
    assert first.heard == second.heard == given
    (routing,) = given
    assert (len(routing.x), routing.phase, routing.global_ids) == (3, Phase.PREFILL, None)
    rank.observation.leave(first)
    forward(rank)
    assert (len(first.heard), second.heard) == (1, given)


def test_two_frames_of_ours_lie_between_the_operator_and_the_runtime(monkeypatch):
    """vLLM calls the method where the model is not compiled, and the operator where it is."""
    stacks = []

    class Stack(Runtime):
        def forward(self, routing, activation):
            frames = (frame.filename for frame in traceback.extract_stack()[:-1])
            stacks.append([Path(name).name for name in frames if "vllm_dymoe" in name])
            return routing.x

    method = moe_method.DymoeMoEMethod.__new__(moe_method.DymoeMoEMethod)
    method.layer, method._weights_on_input = LAYER, False
    method.loading = SimpleNamespace(running=running(Stack()))
    context = SimpleNamespace(no_compile_layers={"layers.0.dymoe": method})
    monkeypatch.setattr(moe_method, "get_forward_context", lambda: context)
    x, weights, ids = torch.zeros(3, 8), torch.zeros(3, 2), torch.zeros(3, 2).int()
    assert method.apply(SimpleNamespace(layer_name="layers.0"), x, weights, ids) is x
    assert torch.equal(torch.ops.vllm_dymoe.moe(x, weights, ids, "layers.0"), x)
    assert stacks == [["moe_method.py", "running.py"]] * 2
