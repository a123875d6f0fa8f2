"""Whose tokens a step computes, read off what vLLM's schedulers and model runners say."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_dymoe.observe.recorder import Span
from vllm_dymoe.predict import Gate
from vllm_dymoe.residency.routing import PromptTokens, Routing
from vllm_dymoe.vllm_adapter.observers import DOMAIN, Observation, TraceObserver


class Listener:
    """A recorder that keeps what it is told."""

    def __init__(self):
        self.recording = True
        self.begun, self.ended, self.names, self.recorded = 0, [], {}, []
        self.numbers, self.forgotten, self.right_gates = [], [], []

    def begin(self):
        self.begun += 1

    def end(self, spans, position, number, next_gate):
        self.ended.append((spans, position))
        self.numbers.append(number)
        self.right_gates.append(next_gate)

    def forget(self, number):
        self.forgotten.append(number)

    def name(self, request, domain):
        self.names[request] = domain

    def record(self, *arguments):
        self.recorded.append(arguments)


def new(name, prompt, domain=None, embeds=False):
    sampling = SimpleNamespace(extra_args={DOMAIN: domain} if domain else None)
    tokens = list(range(prompt))
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=None if embeds else tokens,
        num_computed_tokens=0,
        prompt_embeds=torch.zeros(prompt, 8) if embeds else None,
        sampling_params=sampling,
    )


def scheduled(counts, fresh=(), finished=()):
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=list(fresh),
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
    )


def first_runner(names, position):
    """vLLM's first model runner: one batch that lives on, whose order is its own."""
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=names), positions=torch.tensor(position), execute_model_state=object()
    )


def second_runner(names, counts, position):
    """The second one: a batch for each step, which it may have cut."""
    starts = np.array([0, *np.cumsum(counts), 99, 99])
    batch = SimpleNamespace(
        req_ids=names, num_reqs=len(names), query_start_loc_np=starts, positions=torch.tensor(position)
    )
    return SimpleNamespace(execute_model_state=SimpleNamespace(input_batch=batch))


@pytest.fixture
def listener():
    return Listener()


def test_the_order_of_rows_is_the_runners_and_not_the_schedulers(listener):
    tap = TraceObserver(listener)
    step = scheduled({"a": 1, "b": 3, "c": 2}, [new("a", 9), new("b", 3, "code"), new("c", 7, embeds=True)])
    tap.begin_step(step)
    tap.end_step(first_runner(["c", "a", "b"], [5, 6, 0, 0, 1, 2, 77]), step, 7, failed=False)
    assert listener.begun == 1
    ((spans, position),) = listener.ended
    assert spans == [Span(2, 2, 7), Span(0, 1, 9), Span(1, 3, 3)]
    assert position.tolist()[:6] == [5, 6, 0, 0, 1, 2]
    assert listener.names == {1: "code"}


def test_the_second_runner_says_itself_how_many_rows_a_request_has(listener):
    tap = TraceObserver(listener)
    step = scheduled({"a": 4, "b": 1}, [new("a", 4), new("b", 1)])
    tap.begin_step(step)
    tap.end_step(second_runner(["b", "a"], [1, 3], [0, 0, 1, 2]), step, 7, failed=False)
    assert listener.ended[0][0] == [Span(1, 1, 1), Span(0, 3, 4)]


def test_numbers_last_as_long_as_a_request_and_are_never_given_again(listener):
    tap = TraceObserver(listener)
    tap.begin_step(scheduled({"a": 2, "b": 2}, [new("a", 2), new("b", 2)]))
    tap.begin_step(scheduled({}, finished=["a"]))  # no tokens: the step is not run
    step = scheduled({"b": 1, "a": 5}, [new("a", 5), new("b", 2)], finished=[])  # b was preempted and comes again
    tap.begin_step(step)
    tap.end_step(first_runner(["a", "b"], [0] * 6), step, 7, failed=False)
    assert listener.begun == 2
    assert listener.ended[0][0] == [Span(2, 5, 5), Span(1, 1, 2)]
    tap.begin_step(scheduled({}, finished=["a", "b", "unknown"]))
    assert tap._requests == {}


def test_a_step_that_failed_is_not_recorded(listener):
    tap = TraceObserver(listener)
    step = scheduled({"a": 2}, [new("a", 2)])
    tap.begin_step(step)
    tap.end_step(first_runner(["a"], [0, 1]), step, 7, failed=True)
    listener.recording = False
    tap.end_step(None, step, 7, failed=False)  # nothing is looked at when recording has ended
    assert listener.ended == []


def test_heavy_hitters_are_only_tokens_of_prompts(listener):
    tap = TraceObserver(listener)
    x, weights, ids = torch.zeros(3, 4), torch.ones(3, 2), torch.zeros(3, 2)
    prompt = PromptTokens(torch.tensor([True, True, False]), torch.tensor([True, False, True]), mixed=True)
    tap.see(Routing(0, 1, x, ids, weights, prompt=prompt))
    assert listener.recorded[-1][5].tolist() == [True, False, False]
    tap.see(Routing(0, 1, x, ids, weights))
    assert listener.recorded[-1][5] is None


def test_next_gates_are_asked_about_this_layers_input(listener):
    asked = []

    def gate(number):
        def logits(x):
            asked.append(number)
            return x * (1 if number == 1 else -1)

        return Gate(logits)

    known = []
    tap = TraceObserver(listener, lambda: known)
    x, weights, ids = torch.tensor([[1.0, 3.0, 2.0]]), torch.ones(1, 2), torch.zeros(1, 2)
    tap.begin_step(scheduled({"a": 1}, [new("a", 1)]))
    tap.see(Routing(0, 3, x, ids, weights))
    assert listener.recorded[-1][4] is None, "the gates are not checked yet"
    known += [gate(0), gate(1), gate(2)]
    tap.begin_step(scheduled({"a": 1}))
    for layer in range(3):
        tap.see(Routing(layer, 3, x, ids, weights))
    assert asked == [1, 2]
    assert listener.recorded[-3][4].tolist() == [[1, 2]]
    assert listener.recorded[-2][4].tolist() == [[0, 2]]
    assert listener.recorded[-1][4] is None


def test_a_step_says_whether_the_gates_were_right_and_is_forgotten_by_its_number(listener):
    known = [SimpleNamespace(scores=lambda x: x)] * 2
    tap = TraceObserver(listener, lambda: known)
    for step in (4, 5):
        schedule = scheduled({"a": 1}, [new("a", 2)] if step == 4 else [])
        tap.begin_step(schedule)
        if step == 5:
            known = []  # seen to be wrong while the step was computed
        tap.end_step(first_runner(["a"], [step - 4]), schedule, step, failed=False)
    assert listener.numbers == [4, 5]
    assert listener.right_gates == [True, False]
    tap.forget(4)
    assert listener.forgotten == [4]


def test_a_part_of_a_calibration_listens_while_it_lasts(tmp_path):
    model = {"layers": [0], "hidden_size": 3, "top_k": 2, "dtype": "bfloat16"}
    observation = Observation(model)
    observation.record(tmp_path / "of somebody who went away", 1)
    observation.record(tmp_path / "part", 1)
    (listening,) = observation.observers
    listening.see(Routing(0, 1, torch.ones(1, 3).bfloat16(), torch.zeros(1, 2).int(), torch.ones(1, 2)))
    observation.end_record()
    assert observation.observers == ()
    assert [path.name for path in tmp_path.iterdir()] == ["part"]
    elsewhere = Observation(None)
    elsewhere.record(tmp_path / "another rank's", 1)
    assert elsewhere.observers == ()
