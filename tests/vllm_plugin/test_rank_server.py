"""A rank's running step: begin and end, phase and rows, and its layers' forward."""

import contextlib
import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.errors import refused
from tests.executor.steps import CPU, make_server, random_step
from tests.small_model import make_experts, make_store
from tests.support.faulty_store import FaultyStore
from tests.support.patience import becomes
from tests.vllm_plugin.steps import rank_of, scheduled
from vllm_dymoe.cache.transfer import TransferError, make_engine
from vllm_dymoe.kernels import Activation
from vllm_dymoe.options import Options
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.policies import make_policy
from vllm_dymoe.policies.base import PrecisionPolicy
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.vllm_plugin.expert_ids import bounded_map
from vllm_dymoe.vllm_plugin.failures import StepFailures
from vllm_dymoe.vllm_plugin.moe_method import DymoeMoEMethod
from vllm_dymoe.vllm_plugin.observers import Observer
from vllm_dymoe.vllm_plugin.patches import apply_patches
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig
from vllm_dymoe.vllm_plugin.step import RankLayer, RunningStep

LAYER = RankLayer(0, Activation.SILU, None)


@pytest.mark.parametrize(
    ("what", "phase"),
    [
        (scheduled(1, 1), Phase.DECODE),
        (scheduled(1, 7), Phase.PREFILL),
        (scheduled(4, 1, drafted={"a": 3}), Phase.DECODE),
        (scheduled(4, 2, drafted={"a": 3}), Phase.PREFILL),
        (scheduled(1, 1, reading=["b"]), Phase.PREFILL),  # the last chunk of a prompt
        (scheduled(1, 1, new=[SimpleNamespace(req_id="a")]), Phase.PREFILL),  # the prefix cache has all tokens but one
    ],
)
def test_the_phase_of_a_step(what, phase):
    step = RunningStep()
    step.begin(what)
    assert step.phase is phase
    assert step.real(99) == what.total_num_scheduled_tokens, "drafted tokens are computed like others"


def test_the_scheduler_says_which_requests_read_a_prompt():
    """Use vLLM's own data; the other tests' made-up steps have to match it."""
    fields = dict.fromkeys((field.name for field in dataclasses.fields(CachedRequestData)), ())
    step, what = RunningStep(), scheduled(1, 1)
    for answered, phase in (([0, 1], Phase.PREFILL), ([2, 1], Phase.DECODE)):
        what.scheduled_cached_reqs = CachedRequestData(
            **fields | {"req_ids": ["a", "b"], "num_output_tokens": answered}
        )
        step.begin(what)
        assert step.phase is phase


def test_drafts_that_are_taken_off_while_the_step_begins_are_no_tokens():
    """vLLM's first model runner may take n-gram drafts back after the step began.

    It does so by changing the scheduler's own output.
    """
    step, what = RunningStep(), scheduled(4, 2, drafted={"a": 3, "b": 1})
    step.begin(what)
    what.total_num_scheduled_tokens -= 2
    assert step.tokens == step.real(8) == 4
    assert step.phase is Phase.DECODE


def test_rows_behind_a_steps_tokens_are_padding():
    step = RunningStep()
    step.begin(scheduled(3, 2))
    assert [step.real(rows) for rows in (8, 5, 4)] == [5, 5, 4]
    step.end()
    assert step.real(8) == 8, "a warm-up is computed as it comes"


class Server:
    """The parts of a server that a rank uses; the layers return their input."""

    experts = SimpleNamespace(layers=(0,), num_experts=64)
    policy = SimpleNamespace(precision=PrecisionPolicy(), prefetch=None)
    small_batches, ranks_add_up, no_slots = None, False, ""
    cpu, needs_python = None, True

    def __init__(self, error=None):
        self.log, self.error = [], error

    @property
    def host_planned(self):
        return self

    def begin_step(self, phase):
        pass

    @contextlib.contextmanager
    def unobserved(self):
        self.log.append("unobserved")
        yield

    def forward(self, routing, activation):
        self.log.append(routing)
        if self.error:
            raise self.error
        return routing.x


class Listener(Observer):
    def __init__(self):
        self.heard = []

    def see(self, routing):
        self.heard.append(routing)

    def end_step(self, *_, failed):
        self.heard.append(failed)

    def forget(self, step):
        self.heard.append(f"forget {step}")


class Runner:
    """A model runner that records the step during the model; it samples afterwards."""

    def __init__(self, rank, samples=True):
        self._step, self._samples = rank.step, samples
        self.seen = []

    def execute_model(self, *arguments):
        self.seen.append((self._step.number, self._step.tokens))
        return None if self._samples else object()

    def sample_tokens(self, grammar):
        self.seen.append("sampled")
        return object()


def served_by(runner, rank, runner_type="generate"):
    """Return vLLM's worker in its wrapper, with only the plugin's patches."""
    apply_patches()
    config = DymoeConfig()
    config.loading = SimpleNamespace(rank_server=rank)
    vllm_config = SimpleNamespace(quant_config=config, model_config=SimpleNamespace(runner_type=runner_type))
    worker = SimpleNamespace(vllm_config=vllm_config, model_runner=runner)
    worker.execute_model = runner.execute_model
    worker.sample_tokens = lambda grammar: Worker.sample_tokens(worker, grammar)
    wrapper = SimpleNamespace(worker=worker, _apply_mm_cache=lambda scheduler_output: None)
    wrapper.execute_model = lambda scheduler_output: WorkerWrapperBase.execute_model(wrapper, scheduler_output)
    return wrapper


@pytest.mark.parametrize("samples", [True, False])
def test_a_step_begins_at_the_wrapper_and_ends_with_its_output(samples):
    rank = rank_of(Server())
    runner = Runner(rank, samples)
    wrapper = served_by(runner, rank)
    for _ in range(2):
        wrapper.execute_model(scheduled(4, 1))
        if samples:
            assert rank.step.tokens == 5, "what is computed to sample belongs to the step"
            wrapper.worker.sample_tokens(None)
        assert rank.step.warming_up
    wrapper.execute_model(scheduled(finished=["a"]))
    wrapper.worker.execute_model(scheduled(2, 2))  # as vLLM's second model runner warms up
    assert [seen for seen in runner.seen if seen != "sampled"] == [(1, 5), (2, 5), (2, 0), (2, 0)]


def forward(rank, rows=3):
    x = torch.full((rows, 8), torch.nan)
    return rank.forward(LAYER, x, x, torch.zeros_like(x).int())


def test_a_layer_that_fails_gives_zeros_and_the_layers_behind_it_do_no_work_and_are_not_heard_of():
    server, listener = Server(TransferError("the disk is on fire")), Listener()
    rank = rank_of(server)
    rank.observation.join(listener)
    for number in range(1, 3):
        assert rank.begin_step(scheduled(3))
        for _ in range(3):
            assert torch.equal(forward(rank), torch.zeros(3, 8))
        assert len(server.log) == number
        assert rank.failures.sentence == "vllm-dymoe: the disk is on fire"
        output = rank.end_model(None, scheduled(3), ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}))
        assert output.failure == "vllm-dymoe: the disk is on fire"
        assert rank.step.warming_up
        _, *ended = listener.heard
        assert ended == [True, f"forget {number}"]
        listener.heard.clear()


def test_an_early_stage_of_a_pooling_model_ends_its_step_without_sampling():
    """It has no output, and vLLM samples nothing; a failure must not remain for later steps."""
    rank = rank_of(Server(TransferError("the disk is on fire")))

    class Stage(Runner):
        def execute_model(self, *arguments):
            forward(rank)
            return super().execute_model(*arguments)

    wrapper = served_by(Stage(rank), rank, "pooling")
    assert wrapper.execute_model(scheduled(3)) is None
    assert rank.step.warming_up
    assert rank.failures.sentence is None


def test_a_fault_while_vllm_warms_up_ends_the_start_unless_other_ranks_wait(said):
    rank = rank_of(Server(TransferError("the disk is on fire")))
    with pytest.raises(TransferError, match="on fire"):
        forward(rank)
    rank.failures = StepFailures(rank.step, object())
    assert torch.equal(forward(rank), torch.zeros(3, 8))
    assert said == [(logging.ERROR, "vllm-dymoe: the disk is on fire")]
    rank.begin_step(scheduled(3))
    assert rank.failures.sentence is None, "no request has failed"


def test_observers_hear_of_steps_what_the_server_is_given_and_nothing_of_warm_ups():
    """The inputs of a warm-up are uninitialized memory."""
    server, first, second = Server(), Listener(), Listener()
    rank = rank_of(server)
    rank.observation.join(first)
    rank.observation.join(second)
    forward(rank)
    rank.begin_step(scheduled(3))
    forward(rank, rows=8)
    rank.observation.leave(first)
    forward(rank)
    rank.step.end()
    forward(rank)
    assert [entry == "unobserved" for entry in server.log] == [True, False, False, False, True, False]
    _, _, routing, later, _, _ = server.log
    assert (first.heard, second.heard) == ([routing], [routing, later])
    assert (len(routing.x), routing.phase, routing.global_ids) == (3, Phase.PREFILL, None)


@pytest.mark.parametrize("padding", [-1, 3], ids=["to no expert", "as tokens"])
def test_rows_of_padding_are_not_seen_and_told_from_experts_of_other_ranks(padding):
    """vLLM 0.32 routes padding to expert -1; earlier versions choose any expert."""
    method = DymoeMoEMethod.__new__(DymoeMoEMethod)
    method.layer, method._loader = LAYER, SimpleNamespace(check_complete=lambda: None)
    config = SimpleNamespace(model_config=None, device_config=None)
    method.loading = SimpleNamespace(layer_loaded=lambda position, layer: None, config=config)
    method.process_weights_after_loading(SimpleNamespace(expert_map=torch.tensor([-1, 0, -1, 1], dtype=torch.int32)))
    server = Server()
    rank = rank_of(server)
    x, ids = torch.ones(8, 4), torch.full((8, 2), padding, dtype=torch.int32)
    rank.forward(method.layer, x, torch.ones(8, 2), torch.full_like(ids, -1))
    assert (server.log[1].ids == -1).all(), "a warm-up's padding is the last expert's"
    rank.begin_step(scheduled(2, 1))
    ids[:3] = torch.tensor([[0, 1], [1, 2], [3, 0]])
    out = rank.forward(method.layer, x, torch.ones(8, 2), ids)
    assert out.sum(1).tolist() == [4.0] * 3 + [0.0] * 5, "padding is computed"
    routing = server.log[2]
    assert routing.ids.tolist() == [[-1, 0], [0, -1], [1, -1]]
    assert torch.equal(routing.global_ids, ids[:3])
    assert len(routing.x) == len(routing.weights) == 3


@pytest.mark.parametrize(("adds_up", "failed"), [(True, True), (True, False), (False, True)])
def test_a_rank_starts_over_after_any_ranks_failure_where_ranks_add_up(memory_store, adds_up, failed, monkeypatch):
    agree = {"agree": lambda said: list(said)} if adds_up else {}
    options = Options(group_size=32, misses="fetch", policy="dymoe", low=2, expert_budget="100%")
    rank, calls = rank_of(ExpertServer(memory_store, options, torch.device("cpu"), **agree)), []
    monkeypatch.setattr(rank.failures, "any_new", lambda: failed)
    monkeypatch.setattr(rank.server, "start_over", lambda: calls.append(1))
    rank.begin_step(scheduled(1))
    assert calls == [1] * (adds_up and failed)


def test_ranks_that_share_out_experts_have_one_threshold_after_one_could_not_compute_a_step(memory_store):
    """It computes no later layer of the step, but it sees the same routing there."""
    faulty, experts = FaultyStore(memory_store), memory_store.experts
    everywhere = dataclasses.replace(experts, num_experts=2 * experts.num_experts)
    ranks, layers = [], []
    for number, store in enumerate((memory_store, faulty)):
        engine = make_engine(store, CPU, 0, io_threads=0)
        options = {"policy_options": {"retention": 0.4}, "misses": "fetch"}
        ranks.append(rank_of(make_server(store, "50%", "dymoe", engine=engine, **options)))
        own = torch.full((everywhere.num_experts,), -1, dtype=torch.int32)
        own[number::2] = torch.arange(experts.num_experts, dtype=torch.int32)
        layers.append([RankLayer(layer, Activation.SILU, bounded_map(own)) for layer in range(len(experts.layers))])
    for step in range(4):
        faulty.action = lambda number, key, step=step: "fail" if step == 2 else None
        for rank, own_layers in zip(ranks, layers, strict=True):
            rank.begin_step(scheduled(*[1] * 7))
            for layer in own_layers:
                rank.forward(layer, *random_step(10 * step + layer.position, 7, everywhere))
        failed = [rank.failures.sentence is not None for rank in ranks]
        assert failed == [False, step == 2]
        for rank in ranks:
            rank.end_model(None, None, ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}))
        one, other = ([part.tolist() for part in rank.server.policy.precision.thresholds] for rank in ranks)
        assert one == other, f"after step {step}"
    assert one != [part.tolist() for part in make_policy(ranks[0].server.options).precision.thresholds], "none moved"


class ServedSteps:
    """Steps of three requests, in which a rank runs its first layer."""

    def __init__(self, server):
        self.rank = rank_of(server)
        self._given = random_step(1, 3, server.experts)

    def run(self):
        """Run a step; return the layer's output, and why the step failed."""
        output = scheduled(1, 1, 1)
        self.rank.begin_step(output)
        self.rank.end_native()
        assert self.rank.failures.alone or self.rank.failures.sentence is None, "other ranks may not have begun yet"
        out = self.rank.forward(LAYER, *self._given)
        told = self.rank.end_model(None, output, ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}))
        return out, getattr(told, "failure", "")


@pytest.mark.parametrize("short_of", ["memory", "memory of a card", "disk"])
def test_without_slots_every_step_fails_until_there_are_some_again(memory_store, monkeypatch, short_of):
    """A change failed, and so did undoing it; or the engine sleeps."""
    disk = FaultyStore(make_store(make_experts(nested=True)))
    if short_of == "disk":  # with this policy every expert is read before the first step
        server = make_server(disk, "100%", "dynaexq", misses="fetch", policy_options={"high_set": "layer"})
    else:
        server = make_server(memory_store, "50%", low=0, link_gbps=50.0 if short_of == "memory of a card" else None)
    steps = ServedSteps(server)
    want, failure = steps.run()
    assert want.any()
    assert not failure
    with monkeypatch.context() as short:
        if short_of == "disk":
            short.setattr(disk, "action", lambda number, key: "fail")
        else:
            short.setattr(server._parts, "device_memory", type("Full", (), {"available": lambda self: 5})())
        with refused("every request fails until expert_budget is set again"):
            server.resize("75%" if short_of == "disk" else "25%")
    out, failure = steps.run()
    assert "there are no slots for experts" in failure
    assert steps.rank.native is None
    assert not out.any()
    with steps.rank.idle_step():
        assert not steps.rank.forward(LAYER, *random_step(2, 3, server.experts)).any()
    server.resize(server.options.expert_budget)
    again, failure = steps.run()
    assert torch.equal(again, want)
    assert not failure
    server.sleep(1)
    out, failure = steps.run()
    assert "sleeps" in failure
    assert not out.any()
    server.wake()
    again, failure = steps.run()
    assert torch.equal(again, want)
    assert not failure
    server.close(keep_store=True)


def test_a_read_that_does_not_end_fails_steps_until_the_ranks_can_start_over(memory_store):
    disk = FaultyStore(memory_store)
    options = Options(low=2, group_size=32, policy="dymoe", expert_budget="60%", misses="fetch", transfer_timeout_s=0.2)
    engine = make_engine(disk, CPU, 0, timeout=0.2)
    server = ExpertServer(disk, options, CPU, engine=engine, agree=lambda said: list(said))
    steps = ServedSteps(server)
    steps.rank.failures = StepFailures(steps.rank.step, HashStore())
    disk.action = lambda number, key: "hang"
    assert "took longer than" in steps.run()[1]
    orphaned = list(server.host_planned.fetcher.orphaned)
    for _ in range(2):
        out, failure = steps.run()
        assert "have not ended" in failure
        assert not out.any()
    disk.action = lambda number, key: None
    disk.gate.set()
    assert becomes(lambda: all(fetch.ticket.ended for fetch in orphaned))
    out, failure = steps.run()
    assert not failure
    assert out.any()
    server.check_integrity()
    server.close(keep_store=True)


@pytest.mark.parametrize("misses", ["compute", "fetch"])
def test_a_router_may_give_weights_of_16_bits(memory_store, misses):
    """Also where experts have to be fetched, so that the layer is not one native call."""
    x, weights, ids = random_step(1, 3, memory_store.experts)
    weights, outputs = weights.bfloat16(), []
    for given in (weights, weights.float()):
        rank = rank_of(make_server(memory_store, "25%", misses=misses))
        rank.begin_step(scheduled(1, 1, 1))
        rank.end_native()
        outputs.append(rank.forward(LAYER, x, given, ids))
    assert torch.equal(*outputs)
