"""The prompts of a step, read off what vLLM's attention layers are handed."""

from types import SimpleNamespace

import pytest
import torch

from tests.policy.test_importance import heavy_hitters
from vllm_dymoe.policy import make_policy
from vllm_dymoe.policy.importance import attention_mass
from vllm_dymoe.vllm_adapter import prompt_tap
from vllm_dymoe.vllm_adapter.prompt_tap import WINDOW, PromptTap

CPU = torch.device("cpu")
LAYER = SimpleNamespace(impl=SimpleNamespace(scale=0.25), sliding_window=None)


@pytest.fixture
def begin(monkeypatch):
    """Begin a step whose requests have queries of these lengths; None while vLLM warms up."""

    def step(lengths, ranks=1):
        starts = torch.tensor([0, *(lengths or [])]).cumsum(0)
        metadata = None if lengths is None else {"attn.0": SimpleNamespace(query_start_loc=starts)}
        context = SimpleNamespace(attn_metadata=metadata, additional_kwargs={})
        monkeypatch.setattr(prompt_tap, "get_forward_context", lambda: context)
        monkeypatch.setattr(prompt_tap, "get_tensor_model_parallel_world_size", lambda: ranks)
        return context

    return step


def make_tap(drafted=0, **options):
    policy = make_policy("dymoe", options)
    return PromptTap(lambda: policy, drafted)


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


def test_the_last_attention_layer_counts(begin):
    begin([40])
    tap = make_tap()
    results = []
    for seed in (1, 2):
        tap.attend(LAYER, *queries_and_keys(40, seed))
        results.append(tap.tokens(40, CPU).heavy)
    assert not torch.equal(*results)
    assert not tap.tokens(40, CPU).mixed


def test_a_sliding_window_limits_what_is_seen(begin):
    begin([40])
    tap = make_tap()
    query, key = queries_and_keys(40)
    tap.attend(SimpleNamespace(impl=LAYER.impl, sliding_window=5), query, key)
    assert torch.equal(tap.tokens(40, CPU).heavy, heavy_hitters(attention_mass(query, key, 0.25, WINDOW, 5), 0.2))
    assert not tap.tokens(40, CPU).heavy[:3].any()


def test_without_queries_and_keys_every_token_of_a_prompt_counts(begin):
    """MLA: no attention layer that is listened to."""
    begin([1, 6])
    prompt = make_tap().tokens(7, CPU)
    assert torch.equal(prompt.heavy, prompt.rows)
    assert prompt.rows.tolist() == [False] + [True] * 6


def test_rows_that_are_not_the_attentions_get_the_stand_in(begin):
    """Padding, or ranks that share out the tokens."""
    begin([6])
    tap = make_tap()
    tap.attend(LAYER, *queries_and_keys(6))
    prompt = tap.tokens(8, CPU)
    assert torch.equal(prompt.heavy, prompt.rows)
    assert prompt.mixed, "the padding is no prompt's"


@pytest.mark.parametrize(("lengths", "drafted"), [([1, 1, 1], 0), ([4, 1, 3], 3), (None, 0)])
def test_steps_without_a_prompt_have_none(begin, lengths, drafted):
    begin(lengths)
    tap = make_tap(drafted)
    tap.attend(LAYER, *queries_and_keys(8))
    assert tap.tokens(8, CPU) is None


@pytest.mark.parametrize("retention", [0, 1])
def test_where_every_expert_gets_the_same_tier_nothing_is_computed(begin, retention, monkeypatch):
    begin([40])
    monkeypatch.setattr(prompt_tap, "attention_mass", None)
    tap = make_tap(retention=retention)
    tap.attend(LAYER, *queries_and_keys(40))
    assert tap.tokens(40, CPU) is None


def test_ranks_add_up_what_their_heads_see(begin, monkeypatch):
    begin([30], ranks=2)
    query, key = queries_and_keys(30)
    query *= 10  # so that what a token is counts for more than how many come after it
    monkeypatch.setattr(
        prompt_tap,
        "tensor_model_parallel_all_reduce",
        lambda mass: mass + attention_mass(query[:, 2:], key[:, 1:], 0.25, WINDOW),
    )
    tap = make_tap()
    tap.attend(LAYER, query[:, :2], key[:, :1])
    together, alone = (attention_mass(*heads, 0.25, WINDOW) for heads in ((query, key), (query[:, :2], key[:, :1])))
    assert torch.equal(tap.tokens(30, CPU).heavy, heavy_hitters(together, 0.2))
    assert not torch.equal(heavy_hitters(alone, 0.2), heavy_hitters(together, 0.2))


def test_keys_of_another_layer_are_no_reason_to_fail(begin):
    """A layer that shares the cache of an earlier one has no keys."""
    begin([30])
    tap = make_tap()
    tap.attend(LAYER, *queries_and_keys(30))
    heavy = tap.tokens(30, CPU).heavy
    tap.attend(LAYER, queries_and_keys(30, seed=3)[0], None)
    assert torch.equal(tap.tokens(30, CPU).heavy, heavy)
