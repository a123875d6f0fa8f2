"""The failure of a step: it leaves the worker with the step's output, whichever rank it happened on."""

import pickle

import pytest
from torch.distributed import TCPStore
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput

from tests.vllm_adapter.steps import scheduled
from vllm_dymoe.vllm_adapter.failures import FailedStep, StepFailures
from vllm_dymoe.vllm_adapter.step import RunningStep


@pytest.fixture(scope="module")
def store():
    return TCPStore("127.0.0.1", 0, 1, is_master=True)


def failures_of(store=None, **settings):
    """A rank's failures, and a step of one token that it may begin."""
    step = RunningStep()
    return StepFailures(step, store, **settings), step


def begin(*steps):
    for step in steps:
        step.begin(scheduled(1))


def output():
    return ModelRunnerOutput(req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[7]])


class Later(AsyncModelRunnerOutput):
    def __init__(self, before=lambda: None):
        self._before = before

    def get_output(self):
        self._before()
        return output()


def test_a_step_without_a_failure_is_left_alone():
    failures, step = failures_of()
    begin(step)
    given = output()
    assert failures.finish(given) is given


def test_the_first_sentence_of_a_step_wins_and_the_next_step_is_well():
    failures, step = failures_of()
    begin(step)
    failures.record("first")
    failures.record("second")
    failed = failures.finish(output())
    assert isinstance(failed, FailedStep)
    assert (failed.failure, failed.req_ids, failed.sampled_token_ids) == ("first", ["a"], [[7]])
    assert step.warming_up
    begin(step)
    assert not isinstance(failures.finish(output()), FailedStep)


def test_the_output_that_all_steps_share_is_not_written_to():
    failures, step = failures_of()
    begin(step)
    failures.record("it failed")
    assert isinstance(failures.finish(EMPTY_MODEL_RUNNER_OUTPUT), FailedStep)
    assert not isinstance(EMPTY_MODEL_RUNNER_OUTPUT, FailedStep)


def test_the_sentence_survives_the_way_between_processes():
    again = pickle.loads(pickle.dumps(FailedStep.of(output(), "it failed")))
    assert isinstance(again, FailedStep)
    assert again.failure == "it failed"


def test_an_asynchronous_output_is_checked_when_it_is_there(store):
    (here, mine), (there, theirs) = failures_of(store), failures_of(store, collects=False)
    begin(mine, theirs)
    # The other rank fails after this one has enqueued all its work, but before the step's tokens are there.
    pending = here.finish(Later(before=lambda: there.record("on the other rank")))
    failed = pending.get_output()
    assert isinstance(failed, FailedStep)
    assert failed.failure == "on the other rank"


def test_another_ranks_failure_fails_its_step_and_no_other(store):
    (here, mine), (there, theirs) = failures_of(store), failures_of(store, collects=False)
    for number in range(6):
        begin(mine, theirs)
        if number in (2, 3):
            there.record(f"step {number}")
        given = output()
        assert there.finish(given) is given
        got = here.finish(given)
        if number in (2, 3):
            assert got.failure == f"step {number}"
        else:
            assert got is given


def test_ranks_of_a_pipeline_may_be_in_different_steps(store):
    (last, at_last), (first, at_first) = failures_of(store), failures_of(store, collects=False)
    begin(at_first)
    assert first.finish(None) is None
    begin(at_first)
    first.record("the second step")
    first.finish(None)
    begin(at_last)
    assert not isinstance(last.finish(output()), FailedStep)
    begin(at_last)
    assert last.finish(output()).failure == "the second step"


def test_who_listens_hears_of_every_step_that_failed_and_of_no_other(store):
    (here, mine), (there, theirs) = failures_of(store), failures_of(store, collects=False)
    heard = []
    here.on_failure = heard.append
    for failing in ((), (there,), (here,), ()):
        begin(mine, theirs)
        for rank in failing:
            rank.record("it failed")
        here.finish(output())
    assert heard == [2, 3]


def test_both_ranks_may_fail(store):
    (here, mine), (there, theirs) = failures_of(store), failures_of(store, collects=False)
    begin(mine, theirs)
    there.record("there")
    here.record("here")
    assert here.finish(output()).failure in ("here", "there")
    begin(mine, theirs)
    assert not isinstance(here.finish(output()), FailedStep)
