"""DyMoE: one measure and one threshold (Eq. 5) for each phase.

An expert is high if either phase requests it.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dymoe.options import Options
from vllm_dymoe.planner.importance import importance
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import PromptTokens, Routing
from vllm_dymoe.policies import PolicyOptionError, make_policy
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact
from vllm_dymoe.policies.schedule import Schedule

LAYERS = 8


def routing(layer, ids, weights, prompt=None):
    ids = torch.as_tensor(ids)
    return Routing(layer, LAYERS, torch.zeros(len(ids), 8), ids, torch.as_tensor(weights), prompt=prompt)


def high(plan):
    return {expert for expert, precision in plan.items() if precision is Precision.HIGH}


def prompt_of(rows, heavy):
    rows = torch.tensor(rows, dtype=torch.bool)
    return PromptTokens(rows, torch.tensor(heavy, dtype=torch.bool), not bool(rows.all()))


def test_prefill_takes_the_experts_of_heavy_hitters():
    policy = Dymoe(retention=0.75, high_by="depth")
    ids = [[0, 1], [0, 1], [0, 1], [2, 3], [2, 3]]
    weights = [[0.9, 0.1]] * 5
    heavy = prompt_of([1] * 5, [0, 0, 0, 1, 1])
    assert high(policy.precision.select(routing(7, ids, weights, heavy))) == {2, 3}, "not those with the most tokens"
    every = prompt_of([1] * 5, [1] * 5)
    assert high(policy.precision.select(routing(7, ids, weights, every))) == {0, 1}, (
        "nothing known of attention: the load"
    )


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, LAYERS - 1),
    st.integers(1, 12),
    st.integers(0, 99),
    st.floats(0, 1),
    st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_the_rule_of_mixed_steps_written_out(layer, tokens, seed, retention, of_prompt):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(10, generator=generator)[:3] for _ in range(tokens)])
    weights = torch.rand(tokens, 3, generator=generator)
    rows = torch.tensor(of_prompt[:tokens])
    heavy = rows & (torch.rand(tokens, generator=generator) < 0.4)
    prompt = PromptTokens(rows, heavy, not bool(rows.all())) if rows.any() else None
    plan = Dymoe(retention=retention, high_by="depth").precision.select(routing(layer, ids, weights, prompt))
    schedule, wanted = Schedule(retention), set()
    everywhere = PromptTokens(torch.ones_like(rows), heavy, False)
    for part, told in ((rows, everywhere), (~rows, None)):
        if part.any():
            told = told and PromptTokens(told.rows[part], heavy[part], False)
            phase = importance(ids[part], weights[part], 10, told)[told is None]
            wanted.update(phase.used[phase.first(schedule.critical(layer, LAYERS, len(phase.used)))].tolist())
    assert high(plan) == wanted
    assert list(plan) == sorted(set(ids.flatten().tolist()))


def test_retention_1_is_exact_and_0_is_uniform_low():
    step = routing(7, [[9, 4, 2, 6]], [[0.1, 0.4, 0.3, 0.2]])
    for policy in (Exact(), Dymoe(retention=1)):
        assert policy.precision.precisions == {Precision.HIGH}
        assert policy.precision.select(step) == dict.fromkeys((2, 4, 6, 9), Precision.HIGH)
        assert policy.precision.shares(LAYERS, 4) == {Precision.HIGH: [1.0] * LAYERS}
    low = Dymoe(retention=0)
    assert low.precision.precisions == {Precision.LOW}
    assert low.precision.select(step) == dict.fromkeys((2, 4, 6, 9), Precision.LOW)
    assert low.precision.shares(LAYERS, 4) == {Precision.LOW: [1.0] * LAYERS}


def test_experts_of_a_coming_layer_are_foreseen_in_the_precisions_that_it_will_want():
    """The number t is that of the coming layer, and not all experts are wanted high."""
    policy = Dymoe(retention=0.75, high_by="depth")
    named = [9, 4, 2, 6]  # the best one first
    assert policy.precision.precisions_ahead(7, LAYERS, named) == {
        9: Precision.HIGH,
        4: Precision.HIGH,
        2: Precision.LOW,
        6: Precision.LOW,
    }
    assert high(policy.precision.precisions_ahead(4, LAYERS, named)) == {9, 4, 2}
    assert high(policy.precision.precisions_ahead(0, LAYERS, named)) == {9, 4, 2, 6}
    assert Dymoe(retention=0).precision.precisions_ahead(0, LAYERS, named) == dict.fromkeys(named, Precision.LOW)
    assert Exact().precision.precisions_ahead(7, LAYERS, named) == dict.fromkeys(named, Precision.HIGH)


def test_one_threshold_settles_where_retention_is_met_and_leaves_no_layer_without_a_high_expert():
    """The share of high experts holds over all layers together.

    Layers whose routers are sure get fewer than others.
    """
    generator, policy, counts = torch.Generator().manual_seed(0), Dymoe(retention=0.5), []
    for _ in range(200):
        for layer, spread in enumerate([0.2, 0.5, 1, 1, 2, 2, 3, 4]):
            weights = torch.softmax(torch.randn(1, 8, generator=generator) * spread, 1)
            ids = torch.randperm(32, generator=generator)[:8].unsqueeze(0)
            plan = policy.precision.select(routing(layer, ids, weights))
            largest = int(ids[0, weights.argmax()])
            assert plan[largest] is Precision.HIGH
            counts.append(len(high(plan)))
    layers = torch.tensor(counts[-800:]).view(-1, LAYERS).float().mean(0) / 8
    assert layers.mean() == pytest.approx(0.5, abs=0.02)
    assert layers[0] > 0.7 > 0.35 > layers[-1]


def test_prompts_and_decoded_tokens_have_a_threshold_each():
    """A long prompt in the batch does not change a decoding request's precision.

    It changes neither how the request is measured nor its threshold.
    """
    policy, alone = Dymoe(retention=0.5), Dymoe(retention=0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        ids = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(9)])
        weights = torch.softmax(torch.randn(9, 4, generator=generator), 1)
        mixed = policy.precision.select(routing(3, ids, weights, prompt_of([1] * 8 + [0], [1] * 8 + [0])))
        decoded = high(alone.precision.select(routing(3, ids[8:], weights[8:])))
        assert decoded <= high(mixed)
    assert [int(of[0]) for of in policy.precision.thresholds][1] == int(alone.precision.thresholds[1][0])
    assert int(policy.precision.thresholds[0][0]) != int(policy.precision.thresholds[1][0])


def test_a_batch_counts_on_the_scale_of_one_token():
    """Shares are of all weights, times the active experts.

    So doubling the tokens gives the same experts.
    """
    ids, weights = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0.5, 0.3, 0.15, 0.05]])
    one = Dymoe(retention=0.5).precision.select(routing(0, ids, weights))
    many = Dymoe(retention=0.5).precision.select(routing(0, ids.repeat(16, 1), weights.repeat(16, 1)))
    assert one == many
    assert high(one) == {0, 1}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"retention": 1.5}, "retention: "),
        (
            {"retension": 0.5},
            "retension: .*it has look_ahead",
        ),
        ({"heavy_share": 0}, "heavy_share: "),
        ({"rounding": "down"}, "rounding: .*'nearest'"),
    ],
)
def test_parameters_that_cannot_be_are_refused(options, sentence):
    with pytest.raises(PolicyOptionError, match=sentence):
        make_policy(Options(low=2, policy="dymoe", policy_options=options))


@pytest.mark.parametrize("options", [{}, {"high_by": "depth"}, {"high_by": "equal", "heavy_share": 0.5}])
def test_ranks_that_share_out_experts_decide_on_all_of_them(options):
    """Deciding alone, eight ranks would keep one high expert each at any retention."""
    ranks, experts, top_k = 8, 64, 8
    one, *each = (Dymoe(retention=0.25, **options) for _ in range(1 + ranks))
    generator = torch.Generator().manual_seed(3)
    for tokens in (1, 4, 16) * 8:
        ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
        weights = torch.rand(tokens, top_k, generator=generator).softmax(1)
        prompt = prompt_of([1] * tokens, [n % 2 for n in range(tokens)]) if tokens > 4 else None
        want, got = high(one.precision.select(routing(3, ids, weights, prompt))), set()
        for rank, policy in enumerate(each):
            own = torch.where(ids // (experts // ranks) == rank, ids % (experts // ranks), -1)
            at = routing(3, own, weights, prompt)
            at.global_ids = ids
            got |= {rank * (experts // ranks) + expert for expert in high(policy.precision.select(at))}
        assert got == want
    thresholds = [[threshold.tolist() for threshold in policy.precision.thresholds] for policy in (one, *each)]
    assert all(of_rank == thresholds[0] for of_rank in thresholds)
