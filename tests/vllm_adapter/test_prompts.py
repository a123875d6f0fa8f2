"""The prompts of a step, read off what vLLM tells its attention layers."""

from types import SimpleNamespace

import pytest
import torch

from tests.vllm_adapter.steps import scheduled
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.vllm_adapter import step as step_module
from vllm_dymoe.vllm_adapter.step import PromptTap, RunningStep

CPU = torch.device("cpu")
STEP = RunningStep()


@pytest.fixture
def begin(monkeypatch):
    """Begin a step whose requests have queries of these lengths; without one vLLM warms up, as if they were there."""

    def step(lengths, warming_up=False, padding=()):
        STEP.end()
        if not warming_up:
            STEP.begin(scheduled(*lengths))
        starts = torch.tensor([0, *lengths, *padding]).cumsum(0)
        metadata = {"attn.0": SimpleNamespace(query_start_loc=starts)}
        context = SimpleNamespace(attn_metadata=metadata, additional_kwargs={})
        monkeypatch.setattr(step_module, "get_forward_context", lambda: context)
        return context

    return step


def make_tap(drafted=0, **options):
    system = Dymoe(**options)
    return PromptTap(lambda: system, STEP, drafted)


def test_longer_queries_are_prompts(begin):
    begin([1, 50, 1, 7])
    prompt = make_tap().tokens(59, CPU)
    assert prompt.mixed
    assert prompt.rows.nonzero().flatten().tolist() == [*range(1, 51), *range(52, 59)]


@pytest.mark.parametrize("padding", [(), (0, 0), (34, 0)], ids=["none", "no requests", "a request"])
def test_rows_of_padding_are_no_prompts(begin, padding):
    """Attention has them, in requests without tokens or in one that is longer than any drafted answer."""
    begin([30], padding=padding)
    found = make_tap().tokens(30, CPU)
    assert found.rows.tolist() == [True] * 30
    assert not found.mixed


@pytest.mark.parametrize(
    ("lengths", "drafted", "warming_up", "rows"),
    [([1, 1, 1], 0, False, 3), ([4, 1, 3], 3, False, 8), ([8], 0, True, 8), ([30], 0, False, 7)],
    ids=["decode", "drafts", "warm-up", "a layer that computes only some of the tokens"],
)
def test_steps_without_a_prompt_have_none(begin, lengths, drafted, warming_up, rows):
    begin(lengths, warming_up=warming_up)
    assert make_tap(drafted).tokens(rows, CPU) is None


@pytest.mark.parametrize("retention", [0, 1])
def test_where_every_expert_gets_the_same_tier_no_prompt_is_looked_for(begin, retention):
    begin([40])
    tap = make_tap(retention=retention)
    assert tap.tokens(40, CPU) is tap.marks(40, CPU) is None
    asked = PromptTap(lambda: Dymoe(retention=retention), STEP, asked=lambda: True)
    assert asked.tokens(40, CPU).rows.all(), "a predictor may ask"


def test_marks_say_the_same_without_a_look(begin):
    """Requests and rows that fill up a batch have none."""
    begin([1, 50, 1, 7], padding=[0, 3])
    tap = make_tap()
    marks = tap.marks(62, CPU)
    assert torch.equal(marks[:59], tap.tokens(59, CPU).rows)
    assert not marks[59:].any()
    begin([1, 7])
    assert tap.marks(12, CPU).nonzero().flatten().tolist() == [*range(1, 8)], (
        "rows behind the last prompt are not its own"
    )
    begin([1, 1])
    assert tap.marks(2, CPU) is None
