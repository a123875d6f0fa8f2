"""The prompts of a step, read from the arguments of vLLM's attention layers."""

from types import SimpleNamespace

import pytest
import torch

from tests.planner.test_importance import heavy_hitters
from tests.vllm_plugin.steps import scheduled
from vllm_dymoe.planner.importance import attention_mass
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.vllm_plugin import step as step_module
from vllm_dymoe.vllm_plugin.step import WINDOW, PromptTap, RunningStep

CPU = torch.device("cpu")
LAYER = SimpleNamespace(impl=SimpleNamespace(scale=0.25), sliding_window=None)
STEP = RunningStep()


@pytest.fixture
def begin(monkeypatch):
    """Return a function that begins a step of requests with these query tokens.

    While warming up, vLLM announces no step.
    """

    def step(lengths, ranks=1, warming_up=False, padding=()):
        STEP.end()
        if not warming_up:
            STEP.begin(scheduled(*lengths))
        starts = torch.tensor([0, *lengths, *padding]).cumsum(0)
        metadata = {"attn.0": SimpleNamespace(query_start_loc=starts)}
        context = SimpleNamespace(attn_metadata=metadata, additional_kwargs={})
        monkeypatch.setattr(step_module, "get_forward_context", lambda: context)
        monkeypatch.setattr(step_module, "get_tensor_model_parallel_world_size", lambda: ranks)
        return context

    return step


def make_tap(drafted=0, **options):
    policy = Dymoe(**{"heavy_share": 0.2} | options)
    return PromptTap(lambda: policy, STEP, drafted)


def queries_and_keys(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, 8, generator=generator), torch.randn(rows, 2, 8, generator=generator)


def test_each_prompt_has_heavy_hitters_of_its_own(begin):
    begin([1, 50, 1, 7])
    tap = make_tap(heavy_share=0.2)
    query, key = queries_and_keys(59)
    tap.attend(LAYER, query, key)
    prompt = tap.tokens(59, CPU)
    assert prompt.mixed
    assert prompt.rows.nonzero().flatten().tolist() == [*range(1, 51), *range(52, 59)]
    for part, count in ((slice(1, 51), 10), (slice(52, 59), 2)):
        want = heavy_hitters(attention_mass(query[part], key[part], 0.25, WINDOW), 0.2)
        assert torch.equal(prompt.heavy[part], want)
        assert int(want.sum()) == count
    assert not prompt.heavy[0]
    assert not prompt.heavy[51]


def test_the_last_attention_layer_with_queries_and_keys_counts(begin):
    """Layers without queries and keys leave the heavy hitters as they are.

    A layer that shares an earlier layer's cache has no keys. With MLA no layer has any, and every token counts equally.
    """
    begin([1, 40])
    tap = make_tap()
    prompt = tap.tokens(41, CPU)
    assert prompt.rows.tolist() == [False] + [True] * 40
    assert torch.equal(prompt.heavy, prompt.rows)
    results = []
    for seed in (1, 5):
        query, key = queries_and_keys(41, seed)
        tap.attend(LAYER, query, key)
        results.append(tap.tokens(41, CPU).heavy)
    assert not torch.equal(*results)
    tap.attend(LAYER, query, None)
    assert torch.equal(tap.tokens(41, CPU).heavy, results[1])


def test_a_sliding_window_limits_what_is_seen(begin):
    begin([40])
    tap = make_tap()
    query, key = queries_and_keys(40)
    tap.attend(SimpleNamespace(impl=LAYER.impl, sliding_window=5), query, key)
    found = tap.tokens(40, CPU)
    assert torch.equal(found.heavy, heavy_hitters(attention_mass(query, key, 0.25, WINDOW, 5), 0.2))
    assert not found.heavy[:3].any()
    assert not found.mixed


@pytest.mark.parametrize("padding", [(0, 0), (34, 0)], ids=["no requests", "a request"])
def test_rows_of_padding_are_no_prompts(begin, padding):
    """Attention sees padding as requests without tokens, or as one long request.

    The long one exceeds every drafted answer.
    """
    query, key = queries_and_keys(64)
    query[30:] = key[30:] = torch.nan
    seen = []
    for rows in (30, 64):
        begin([30], padding=padding if rows == 64 else ())
        tap = make_tap()
        tap.attend(LAYER, query[:rows], key[:rows])
        seen.append(tap.tokens(30, CPU))
    alone, beside = seen
    assert torch.equal(alone.heavy, beside.heavy)
    assert int(alone.heavy.sum()) == 6
    assert beside.rows.tolist() == [True] * 30
    assert not beside.mixed


@pytest.mark.parametrize(
    ("lengths", "drafted", "warming_up", "rows"),
    [([1, 1, 1], 0, False, 3), ([4, 1, 3], 3, False, 8), ([8], 0, True, 8), ([30], 0, False, 7)],
    ids=["decode", "drafts", "warm-up", "a layer that computes only some of the tokens"],
)
def test_steps_without_a_prompt_have_none(begin, lengths, drafted, warming_up, rows):
    begin(lengths, warming_up=warming_up)
    tap = make_tap(drafted)
    tap.attend(LAYER, *queries_and_keys(sum(lengths)))
    assert tap.tokens(rows, CPU) is None


@pytest.mark.parametrize("retention", [0, 1])
def test_where_every_expert_gets_the_same_precision_attention_is_not_asked(begin, retention, monkeypatch):
    begin([40])
    monkeypatch.setattr(step_module, "attention_mass", None)
    tap = make_tap(retention=retention)
    tap.attend(LAYER, *queries_and_keys(40))
    assert tap.tokens(40, CPU) is None


def test_where_every_token_counts_attention_is_not_asked(begin, monkeypatch):
    begin([40])
    monkeypatch.setattr(step_module, "attention_mass", None)
    tap = make_tap(heavy_share=1)
    tap.attend(LAYER, *queries_and_keys(40))
    found = tap.tokens(40, CPU)
    assert found.heavy.all()
    assert found.rows.all()


def test_ranks_add_up_what_their_heads_see(begin, monkeypatch):
    begin([30], ranks=2)
    query, key = queries_and_keys(30)
    query *= 10  # attention then counts for more than the number of tokens that follow
    monkeypatch.setattr(
        step_module,
        "tensor_model_parallel_all_reduce",
        lambda mass: mass + attention_mass(query[:, 2:], key[:, 1:], 0.25, WINDOW),
    )
    tap = make_tap()
    tap.attend(LAYER, query[:, :2], key[:, :1])
    together, alone = (attention_mass(*heads, 0.25, WINDOW) for heads in ((query, key), (query[:, :2], key[:, :1])))
    assert torch.equal(tap.tokens(30, CPU).heavy, heavy_hitters(together, 0.2))
    assert not torch.equal(heavy_hitters(alone, 0.2), heavy_hitters(together, 0.2))


@pytest.mark.parametrize("share", [1, 0.2])
def test_marks_say_the_same_without_a_look(begin, share):
    """Padding requests and padding rows have no marks."""
    begin([1, 50, 1, 7], padding=[0, 3])
    tap = make_tap(heavy_share=share)
    tap.attend(LAYER, *queries_and_keys(62))
    found, marks = tap.tokens(59, CPU), tap.marks(62, CPU)
    assert marks.dtype == torch.int8
    assert torch.equal(marks[:59], found.rows.to(torch.int8) + found.heavy.to(torch.int8))
    assert not marks[59:].any()
    begin([1, 7])
    assert tap.marks(12, CPU).nonzero().flatten().tolist() == [*range(1, 8)], (
        "rows behind the last prompt are not its own"
    )
    begin([1, 1])
    assert tap.marks(2, CPU) is None
