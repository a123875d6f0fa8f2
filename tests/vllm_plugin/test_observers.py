"""Whose tokens a step computes, from the data of vLLM's schedulers and runners."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.vllm_plugin.steps import scheduled
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.prefetch import Gate
from vllm_dymoe.trace.recorder import Span
from vllm_dymoe.vllm_plugin.observers import TraceObserver

X, WEIGHTS, IDS = torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 2), torch.zeros(1, 2)


def new(name, prompt, embeds=False):
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=None if embeds else list(range(prompt)),
        num_computed_tokens=0,
        prompt_embeds=torch.zeros(prompt, 8) if embeds else None,
    )


def first_runner(names, position):
    """Return vLLM's first model runner: one persistent batch in an order of its own."""
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=names), positions=torch.tensor(position), execute_model_state=object()
    )


@pytest.fixture
def recorder():
    return Mock(recording=True, header=SimpleNamespace(hidden=3))


def spans_of(recorder):
    (call,) = recorder.end.call_args_list
    return call.args[0]


def test_the_order_of_rows_is_the_runners_and_not_the_schedulers(recorder):
    observer = TraceObserver(recorder)
    step = scheduled(1, 3, 2, new=[new("a", 9), new("b", 3), new("c", 7, embeds=True)])
    observer.begin_step(step)
    runner = first_runner(["c", "a", "b"], [5, 6, 0, 0, 1, 2, 77])
    observer.end_step(runner, step, 7, failed=False)
    recorder.begin.assert_called_once()
    recorder.end.assert_called_once_with(
        [Span(2, 2, 7), Span(0, 1, 9), Span(1, 3, 3)], runner.positions, 7, next_gate=False
    )


def test_numbers_last_as_long_as_a_request_and_are_never_given_again(recorder):
    observer = TraceObserver(recorder)
    observer.begin_step(scheduled(2, 2, new=[new("a", 2), new("b", 2)]))
    observer.begin_step(scheduled(finished=["a"]))  # no tokens: the step does not run
    step = scheduled(5, 1, new=[new("a", 5), new("b", 2)])  # b returns after a preemption
    observer.begin_step(step)
    observer.end_step(first_runner(["a", "b"], [0] * 6), step, 7, failed=False)
    assert recorder.begin.call_count == 2
    assert spans_of(recorder) == [Span(2, 5, 5), Span(1, 1, 2)]
    observer.begin_step(scheduled(finished=["a", "b", "unknown"]))
    assert observer._requests == {}


def test_next_gates_are_asked_about_this_layers_input(recorder):
    known = []
    observer = TraceObserver(recorder, lambda: known)

    def next_gates(step):
        observer.begin_step(step)
        recorder.record.reset_mock()
        for layer in range(3):
            observer.see(Routing(layer, 3, X, IDS, WEIGHTS))
        observer.end_step(first_runner(["a"], [0]), step, 7, failed=False)
        found = [call.kwargs["next_gate"] for call in recorder.record.mock_calls]
        return [gates if gates is None else gates.tolist() for gates in found]

    assert next_gates(scheduled(1, new=[new("a", 1)])) == [None] * 3, "the gates are not checked yet"
    known += [Gate(lambda x: x), Gate(lambda x: x), Gate(lambda x: -x)]
    assert next_gates(scheduled(1)) == [[[1, 2]], [[0, 2]], None]
    (told,) = recorder.take_gates.call_args_list
    assert told.args[0].weights[2].tolist() == (-torch.eye(3)).tolist()
    step = scheduled(1)
    observer.begin_step(step)
    known.clear()  # the gates were found to be wrong during the step
    observer.end_step(first_runner(["a"], [0]), step, 7, failed=False)
    assert [call.kwargs["next_gate"] for call in recorder.end.call_args_list] == [False, True, False]
