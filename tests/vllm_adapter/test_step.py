"""The running step: whose it is, how many rows are tokens, its phase, and where it begins and ends."""

import dataclasses
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerWrapperBase

from tests.vllm_adapter.steps import scheduled
from vllm_dymoe.config import Options
from vllm_dymoe.residency.routing import Phase
from vllm_dymoe.systems.base import Precision
from vllm_dymoe.vllm_adapter.failures import StepFailures
from vllm_dymoe.vllm_adapter.gates import Foresight
from vllm_dymoe.vllm_adapter.observers import Observation
from vllm_dymoe.vllm_adapter.patches import apply_patches
from vllm_dymoe.vllm_adapter.quant_config import DymoeConfig
from vllm_dymoe.vllm_adapter.running import Running
from vllm_dymoe.vllm_adapter.step import RunningStep


@pytest.mark.parametrize(
    ("tokens", "drafted", "phase"),
    [
        ((1, 1), {}, Phase.DECODE),
        ((1, 7), {}, Phase.PREFILL),
        ((4, 1), {"a": 3}, Phase.DECODE),
        ((4, 2), {"a": 3}, Phase.PREFILL),
    ],
)
def test_the_phase_of_a_step(tokens, drafted, phase):
    step = RunningStep()
    step.begin(scheduled(*tokens, drafted=drafted))
    assert step.phase is phase
    assert step.real(99) == sum(tokens), "drafted tokens are computed like others"


@pytest.mark.parametrize(
    "what",
    [
        scheduled(1, 1, reading=["b"]),
        scheduled(1, 1, new=[SimpleNamespace(req_id="a")]),
    ],
    ids=["the last chunk", "all but one token is cached"],
)
def test_a_prompt_of_which_one_token_is_left_is_a_prompt(what):
    step = RunningStep()
    step.begin(what)
    assert step.phase is Phase.PREFILL


def test_the_scheduler_says_who_reads_a_prompt():
    """In its own words, which a made-up step has to follow."""
    fields = dict.fromkeys((field.name for field in dataclasses.fields(CachedRequestData)), ())
    cached = CachedRequestData(**fields | {"req_ids": ["a", "b"], "num_output_tokens": [0, 1]})
    step, what = RunningStep(), scheduled(1, 1)
    what.scheduled_cached_reqs = cached
    step.begin(what)
    assert step.phase is Phase.PREFILL
    cached = CachedRequestData(**fields | {"req_ids": ["a", "b"], "num_output_tokens": [2, 1]})
    what.scheduled_cached_reqs = cached
    step.begin(what)
    assert step.phase is Phase.DECODE


def test_drafts_that_are_taken_off_while_the_step_begins_are_no_tokens():
    """vLLM's first model runner does so with the n-grams of a GPU, in the scheduler's own words."""
    step, what = RunningStep(), scheduled(4, 2, drafted={"a": 3, "b": 1})
    step.begin(what)
    what.total_num_scheduled_tokens -= 2
    assert step.tokens == step.real(8) == 4
    assert step.phase is Phase.DECODE


def test_rows_behind_a_steps_tokens_are_nobodys():
    step = RunningStep()
    step.begin(scheduled(3, 2))
    assert [step.real(rows) for rows in (8, 5, 4)] == [5, 5, 4]
    step.end()
    assert step.real(8) == 8, "a warm-up is computed as it comes"


class Runner:
    """A model runner that says what the step is while the model runs; its tokens are sampled afterwards."""

    def __init__(self, step, answers=True):
        self._step, self._answers = step, answers
        self.seen = []

    def execute_model(self, *arguments):
        self.seen.append((self._step.number, self._step.tokens))
        return None if self._answers else object()

    def sample_tokens(self, grammar):
        self.seen.append("sampled")
        return object()


def rank_of(step):
    """A rank whose steps these are, without anything to compute."""
    system, experts = SimpleNamespace(precision=Precision()), SimpleNamespace(layers=())
    serving = SimpleNamespace(begin_step=lambda phase: None)
    runtime = SimpleNamespace(system=system, experts=experts, decode=None, serving=serving)
    foresight = Foresight(Options(system="on-demand"))
    return Running(runtime, step, StepFailures(step), foresight, Observation(), lambda path: None)


def served_by(runner, step):
    """vLLM's worker in its wrapper, with our patches and nothing else."""
    apply_patches()
    config = DymoeConfig.__new__(DymoeConfig)
    config.loading = SimpleNamespace(running=rank_of(step))
    worker = SimpleNamespace(vllm_config=SimpleNamespace(quant_config=config), model_runner=runner)
    worker.execute_model = runner.execute_model
    worker.sample_tokens = lambda grammar: Worker.sample_tokens(worker, grammar)
    wrapper = SimpleNamespace(worker=worker, _apply_mm_cache=lambda scheduler_output: None)
    wrapper.execute_model = lambda scheduler_output: WorkerWrapperBase.execute_model(wrapper, scheduler_output)
    return wrapper


@pytest.mark.parametrize("samples", [True, False])
def test_a_step_begins_at_the_wrapper_and_ends_with_its_output(samples):
    step = RunningStep()
    runner = Runner(step, samples)
    wrapper = served_by(runner, step)
    for _ in range(2):
        wrapper.execute_model(scheduled(4, 1))
        if samples:
            assert step.tokens == 5, "what is computed to sample belongs to the step"
            wrapper.worker.sample_tokens(None)
        assert step.warming_up
    wrapper.execute_model(scheduled(finished=["a"]))
    assert [seen for seen in runner.seen if seen != "sampled"] == [(1, 5), (2, 5), (2, 0)]


def test_what_vllm_executes_to_warm_up_is_no_step():
    """Its second model runner calls the worker itself, with requests that it has made up."""
    step = RunningStep()
    runner = Runner(step)
    wrapper = served_by(runner, step)
    wrapper.worker.execute_model(scheduled(2, 2))
    wrapper.worker.sample_tokens(None)
    wrapper.execute_model(scheduled(3))
    assert runner.seen == [(0, 0), "sampled", (1, 3)]
