"""The program that plans a layer's step gives its plain twin's tensors.

They are compared bit for bit.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.sections import DEVICE, at_the_edge
from tests.kernels.twins import Twins
from tests.support import recorded_routing
from tests.support.decode_steps import (
    COSTS,
    EXPERTS,
    LAYERS,
    RANKS,
    TOKENS,
    make_table,
    numbers_of,
    own_ids,
    random_step,
    rows,
)
from tests.support.decode_steps import decide as decide_step
from vllm_dymoe.kernels.triton.planner import plan_small_batch_on_gpu
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.rule import HIGH, LOW
from vllm_dymoe.planner.table import ID_BITS, Counter, check_integrity, set_pools
from vllm_dymoe.planner.threshold import NO_THRESHOLD
from vllm_dymoe.policies.adaptive import Adaptive
from vllm_dymoe.policies.dymoe import Dymoe

quotas = st.lists(st.integers(0, EXPERTS), min_size=LAYERS, max_size=LAYERS)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, LAYERS - 1), st.integers(1, TOKENS), st.integers(0, 1 << 30)),
        min_size=1,
        max_size=6,
    ),
    quotas,
    quotas,
    st.sampled_from([0.0, 0.3, 0.75, 1.0]),
    st.sampled_from(["threshold", "depth"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 7]),
    st.booleans(),
    st.sampled_from(sorted(COSTS)),
    st.sampled_from(["coldest", "least recent", "first in"]),
    st.sampled_from(["keep", "renormalize"]),
    st.sampled_from(sorted(RANKS)),
)
def test_any_predictions_and_steps(
    steps, low, high, retention, high_by, reuse_high, skip_low, staging, nested, costs, evicts, skipped_weights, rank
):
    """Nothing is prefetched if the low version is nested in the high one."""
    options = {"skip_low": skip_low, "staging": staging, "nested": nested, "costs": COSTS[costs]}
    chosen = {"retention": retention, "high_by": high_by, "reuse_high": reuse_high}
    policy = Dymoe(**chosen, evicts=evicts, skipped_weights=skipped_weights)
    twins, numbers = Twins({LOW: low, HIGH: high}, policy=policy, numbers=RANKS[rank], **options), RANKS[rank]
    for foreseen, layer, tokens, seed in steps:
        ids, weights = random_step(seed, tokens, experts=EXPERTS if numbers is None else len(numbers))
        if foreseen and not nested:
            twins.stage(layer, seed)
        twins.step(layer, ids, weights, real=seed % (tokens + 3), weights_on_input=seed % 3 == 1)
        check_integrity(twins.plain.on_host(), ranges=True)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("share", "costs"), [(0, "share"), (2, "fetch"), (3, "share"), (5, "share"), (EXPERTS, "fetch")]
)
def test_a_long_run_of_single_tokens(share, nested, costs):
    """Quotas are none, k - 1, k, more, and all."""
    quotas = {LOW: [share] * LAYERS, HIGH: [share] * LAYERS}
    twins = Twins(quotas, policy=Dymoe(retention=0.6), nested=nested, costs=COSTS[costs])
    for seed in range(20):
        twins.step(seed % LAYERS, *random_step(seed, 1))
    check_integrity(twins.plain.on_host(), ranges=True)
    assert bool(twins.plain.counters[:, Counter.CPU_EXECUTED].any()) == (costs == "share")


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens"), [(1024, 22, 3), (512, 22, 5), (128, 8, 32), (33, 4, 70), (32, 4, 256)]
)
def test_sizes_of_models(experts, top_k, tokens):
    """The last batch has 32 requests with drafts of 8 tokens."""
    quotas = {LOW: [experts // 8] * LAYERS, HIGH: [experts // 4] * LAYERS}
    options = {"experts": experts, "top_k": top_k, "tokens": tokens, "nested": experts == 128}
    options["costs"] = COSTS["share"]
    twins = Twins(quotas, policy=Dymoe(retention=0.5), staging=3, **options)
    for seed in range(3):
        ids, weights = random_step(seed, tokens if seed else 1, top_k, experts)
        twins.step(0, ids.int() if seed == 1 else ids, weights)


@pytest.mark.parametrize(("experts", "own", "top_k", "tokens"), [(1024, 128, 22, 3), (512, 512, 22, 2), (33, 5, 4, 70)])
def test_sizes_of_ranks(experts, own, top_k, tokens):
    """A rank has some of the experts, and chooses among all of them."""
    quotas, numbers = {LOW: [own // 8] * LAYERS, HIGH: [own // 4] * LAYERS}, numbers_of(experts, own)
    for high_by in ("threshold", "depth"):
        policy = Dymoe(retention=0.5, high_by=high_by)
        twins = Twins(quotas, policy=policy, experts=own, top_k=top_k, tokens=tokens, numbers=numbers)
        for seed in range(2):
            ids, weights = random_step(seed, tokens if seed else 1, top_k, experts)
            twins.step(0, ids.int() if seed == 1 else ids, weights)


@pytest.mark.parametrize("nested", [False, True])
def test_precision_shares_and_records_change_between_steps(nested):
    """They are values in memory, so a launch stays the same."""
    twins = Twins({LOW: [3, 3], HIGH: [3, 3]}, nested=nested)
    for number, (low, high, retention) in enumerate([(3, 3, 0.5), (6, 0, 0.5), (1, 2, 0.9), (3, 3, 0.0)]):
        precision = Dymoe(retention=retention, high_by="threshold" if number % 2 else "depth").precision
        critical = torch.from_numpy(precision.critical_counts(LAYERS, EXPERTS))
        for table in (twins.plain, twins.table):
            pools = {code: [(int(table.pool[0, code]), int(table.slot_bytes[0, code]), 12)] for code in (LOW, HIGH)}
            set_pools(table, pools, {LOW: [low] * LAYERS, HIGH: [high] * LAYERS})
            table.critical.copy_(critical)
            table.threshold.copy_(torch.tensor((precision.thresholds or [NO_THRESHOLD] * 2)[1]))
            table.recording.fill_(number % 2)
        for seed in range(5):
            twins.step(seed % LAYERS, *random_step(10 * number + seed, 2))


def test_routing_that_repeats_an_expert_or_names_none():
    twins = Twins({LOW: [2, 2], HIGH: [2, 2]})
    weights = torch.tensor([[0.5, 0.3, 0.2]] * 3)
    twins.step(0, torch.tensor([[5, 5, 5], [-1, -1, -1], [5, 2, 2]]), weights)
    twins.step(0, torch.full((3, 3), -1), weights)


OUTSIDE = (EXPERTS, 32768, 65536, 65537, (1 << 31) - 1, (1 << 32) + 1, 1 << 40, -2, -(1 << 31), -(1 << 40))


@pytest.mark.parametrize("wrong", OUTSIDE)
def test_an_expert_outside_the_model_is_told_and_the_others_are_served(wrong):
    """The number may wrap in 16 or 32 bits.

    Rows that are no tokens may have any ids.
    """
    quotas, costs = {LOW: [3, 3], HIGH: [3, 3]}, COSTS["share"]
    twins, alone = Twins(quotas, costs=costs), make_table(quotas, costs=costs)
    ids, weights = random_step(1, absent=0)
    ids, bad, unread = (ids.to(torch.int64, copy=True) for _ in range(3))
    bad[2, 1], unread[-1, 0] = wrong, wrong
    if -(1 << 31) <= wrong < 1 << 31:
        bad, unread = bad.int(), unread.int()
    for table in (twins.plain, twins.table, alone):
        table.recording.fill_(1)
    twins.step(1, unread, weights, real=TOKENS - 1)
    decide_step(alone, 1, ids, weights, real=TOKENS - 1)
    assert twins.plain.outside.tolist() == [-1, -1]
    plan = twins.step(1, bad, weights)
    assert twins.plain.outside.tolist() == [-1, wrong & ID_BITS]
    want = decide_step(alone, 1, ids.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(-1)), weights)
    for name, values in want.tensors.items():
        assert torch.equal(values, getattr(plan, name)), name
    assert torch.equal(alone.ring_ids, twins.plain.ring_ids)


@pytest.mark.parametrize("wrong", [30, 65537, (1 << 32) + 1, -2])
def test_so_is_one_outside_of_all_ranks(wrong):
    numbers, quotas = RANKS["with others"], {LOW: [3, 3], HIGH: [3, 3]}
    twins = Twins(quotas, numbers=numbers)
    alone = make_table(quotas, all_experts=len(numbers))
    ids, weights = random_step(1, absent=0, experts=len(numbers))
    ids = ids.long()
    bad = ids.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(wrong))
    absent = ids.index_put((torch.tensor(2), torch.tensor(1)), torch.tensor(-1))
    twins.step(1, bad, weights)
    assert twins.plain.outside.tolist() == [-1, len(numbers) if wrong > 0 else -2 & ID_BITS]
    decide_step(alone, 1, own_ids(numbers, absent), weights, global_ids=absent)
    for name in ("threshold", "chosen", "score", "precision"):
        assert torch.equal(getattr(alone, name), getattr(twins.plain, name)), name


def test_ids_of_all_ranks_are_needed_where_they_are_read_and_refused_elsewhere():
    ids, weights = random_step(0, 1)
    for all_experts, global_ids in ((30, None), (0, ids)):
        table = make_table({LOW: [0, 0], HIGH: [0, 0]}, all_experts=all_experts)
        with pytest.raises(ValueError, match="global_ids are needed"):
            decide_step(table, 0, ids, weights, global_ids=global_ids)
        given = table.at(0), 0, ids, weights, rows(1), LayerPlan.allocate(1, 3, EXPERTS, "cpu").tensors
        with pytest.raises(ValueError, match="global_ids are needed"):
            plan_small_batch_on_gpu(*given, global_ids=global_ids)


@pytest.mark.parametrize("costs", ["fetch", "share", "compute"])
@pytest.mark.parametrize("nested", [False, True])
def test_where_others_write_the_rows_what_weighs_much_is_streamed_or_executed(nested, costs):
    """Every expert is resident, half of them high, and no row changes.

    A threshold of 1.2 even shares stays.
    """
    policy = Adaptive(threshold=1.2)
    twins = Twins({LOW: [EXPERTS] * 2, HIGH: [EXPERTS] * 2}, policy=policy, nested=nested, costs=COSTS[costs])
    held, slots = torch.ones(LAYERS, EXPERTS, dtype=torch.int8), torch.arange(EXPERTS, dtype=torch.int32)
    held[:, ::2] = HIGH
    for table in (twins.plain, twins.table):
        table.precision.copy_(held)
        table.slot.fill_(-1)
        table.slot[0] = slots
        if nested:
            table.slot[1, :, ::2] = slots[::2]
    before = {name: getattr(twins.plain, name).clone() for name in ("precision", "slot", "threshold")}
    for seed in range(12):
        twins.step(seed % LAYERS, *random_step(seed))
    assert all(torch.equal(values, getattr(twins.plain, name)) for name, values in before.items())
    counts = twins.plain.counters.sum(0)
    promoted = Counter.CPU_EXECUTED if costs == "compute" else Counter.STREAMED
    assert counts[promoted] > 0
    assert counts[Counter.EVICTIONS] == 0
    assert counts[Counter.HITS] > 0


@pytest.mark.parametrize("evicts", ["coldest", "least recent", "first in"])
@pytest.mark.parametrize("nested", [False, True])
def test_recorded_routing(nested, evicts):
    """The choices are those of a trained model's routers.

    Some experts are popular, and successive steps resemble each other.
    """
    sizes = {"experts": recorded_routing.EXPERTS, "top_k": recorded_routing.TOP_K}
    twins = Twins({LOW: [4, 3], HIGH: [5, 6]}, policy=Dymoe(retention=0.75, evicts=evicts), nested=nested,
                  costs=COSTS["share"], **sizes)  # fmt: skip
    for step, (layer, ids, weights) in enumerate(recorded_routing.recorded_steps(3)):
        twins.step(layer, ids, weights, real=min(3, step))
    assert twins.plain.counters[:, 4].sum() > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="compute-sanitizer looks for the same on a GPU")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("real", [0, 1, TOKENS])
@pytest.mark.parametrize("rank", ["alone", "with copies"])
def test_nothing_beside_the_tensors_is_touched(real, nested, rank):
    quotas, told = {LOW: [3, 0], HIGH: [0, 5]}, {"staging": 4, "nested": nested, "costs": COSTS["share"]}
    twins = Twins(quotas, place=at_the_edge, numbers=RANKS[rank], **told)
    experts = EXPERTS if RANKS[rank] is None else len(RANKS[rank])
    for layer in range(LAYERS):
        twins.table.recording.fill_(1), twins.plain.recording.fill_(1)
        if not nested:
            twins.stage(layer, layer)
        twins.step(layer, *random_step(layer, experts=experts), real=real)


def test_what_the_program_does_not_hold_is_refused():
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, experts=1025)
    plan = LayerPlan.allocate(1, 3, 1025, "cpu")
    ids, weights = random_step(0, 1)
    with pytest.raises(ValueError, match="1025 experts, but device-side planning supports at most 1024"):
        plan_small_batch_on_gpu(table.at(0), 0, ids, weights, rows(1), plan.tensors)
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, all_experts=1025)
    with pytest.raises(ValueError, match="1025 experts, but device-side planning supports at most 1024"):
        plan_small_batch_on_gpu(table.at(0), 0, ids, weights, rows(1), plan.tensors, global_ids=ids)
    table = make_table({LOW: [0, 0], HIGH: [0, 0]})
    ids, weights = random_step(0, TOKENS + 1)
    with pytest.raises(ValueError, match="7 tokens"):
        plan_small_batch_on_gpu(
            table.at(0), 0, ids, weights, rows(1), vars(LayerPlan.allocate(TOKENS + 1, 3, EXPERTS, "cpu"))
        )
    with pytest.raises(TypeError, match=r"weights is torch.float64"):
        plan_small_batch_on_gpu(table.at(0), 0, ids, weights.double(), rows(1), plan.tensors)


@pytest.mark.parametrize("high_by", ["threshold", "depth"])
@pytest.mark.parametrize("nested", [False, True])
def test_rows_that_are_not_finite_count_in_no_statistic(nested, high_by):
    """Their experts are computed, but no score and no threshold changes."""
    options = {"policy": Dymoe(retention=0.5, high_by=high_by), "nested": nested}
    quotas = {LOW: [3, 3], HIGH: [4, 4]}
    twins, alone = Twins(quotas, **options), make_table(quotas, **options)
    for seed in range(12):
        ids, weights = random_step(seed, TOKENS, absent=0)
        poison = (float("nan"), float("inf"), -float("inf"), 1e30)[seed % 4]
        weights[2], ids[4], weights[4, 1:] = poison, -1, poison
        twins.step(seed % LAYERS, ids, weights)
        decide_step(alone, seed % LAYERS, torch.cat((ids[:2], ids[3:])), torch.cat((weights[:2], weights[3:])))
        for name in ("score", "used_at", "threshold", "step"):
            assert torch.equal(getattr(twins.plain, name), getattr(alone, name)), name
