"""What is fetched ahead: the most important of what is missing, and no row, slot or tier that changes for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.decode_steps import (
    EXPERTS,
    FORMATS,
    LAYERS,
    POOL,
    SOURCE,
    TOP_K,
    decide,
    make_table,
    random_step,
    rows,
)
from vllm_dymoe.residency.constants import Fate
from vllm_dymoe.residency.decode_ahead import Copies, name_ahead_plain
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.residency.table import Counter, check_integrity
from vllm_dymoe.systems.dymoe import Dymoe

EXACT = Dymoe(retention=1)


def foresee(table, layer, ids, scores, real=None):
    """The spans that are copied: source, destination and bytes."""
    copies = Copies.allocate(*ids.shape, table.experts, "cpu")
    name_ahead_plain(table, layer, ids, scores, rows(len(ids) if real is None else real), copies)
    return [span for span in copies.spans.tolist() if span[2]]


def guess(*experts):
    """One token, its experts the most likely first."""
    return torch.tensor([experts]), torch.linspace(0.9, 0.1, len(experts))[None]


def source(layer, expert, code=HIGH):
    return SOURCE[code] + (layer * EXPERTS + expert << 12)


@pytest.mark.parametrize(("most_ahead", "parts"), [(0, []), (1, [1]), (3, [3]), (5, [3, 2]), (24, [3, 3])])
def test_the_likeliest_that_are_missing_as_far_as_slots_and_projections_go(most_ahead, parts):
    table = make_table({LOW: [0, 0], HIGH: [2, 2]}, system=EXACT, staging=6, most_ahead=most_ahead)
    if most_ahead == 0:
        table.ahead[HIGH] = torch.tensor([4, 2])
    decide(table, 1, *guess(7, 2))
    spans = foresee(table, 1, *guess(7, 5, 3, 1))
    offsets = [section.start for section in FORMATS[HIGH].sections] + [1 << 12]
    first = int(table.ahead[HIGH].sum())  # of odd layers
    assert spans == [
        [source(1, expert), POOL[HIGH] + (first + number << 12), offsets[part]]
        for number, (expert, part) in enumerate(zip((5, 3), parts, strict=False))
    ]


def test_what_was_fetched_ahead_is_read_there_and_kept_by_way_of_the_layers_own_slot():
    table = make_table({LOW: [0, 0], HIGH: [1, 1]}, system=EXACT, staging=9, most_ahead=8)
    spans = {span[0]: span[1] for span in foresee(table, 1, *guess(5, 3, 1))}
    decision = decide(table, 1, *guess(5, 4, 3))
    offsets = table.offsets[HIGH].tolist()
    three, four, five = range(3)
    assert decision.fate[0, :3].tolist() == [Fate.KEEP, Fate.PASS, Fate.PASS]
    whole, part = spans[source(1, 5)], spans[source(1, 3)]
    assert decision.addresses[0, five].tolist() == [whole + offset for offset in offsets]
    assert decision.destinations[0, five].tolist() == [0, 0, 0]
    assert decision.addresses[0, four].tolist() == [source(1, 4) + offset for offset in offsets]
    assert decision.addresses[0, three].tolist() == [part + offset for offset in offsets]
    slot = POOL[HIGH] + (int(table.slot[0, 1, 3]) << 12)
    assert decision.destinations[0, three].tolist() == [slot + offset for offset in offsets]
    assert table.counters[1, [Counter.AHEAD, Counter.AHEAD_USED]].tolist() == [3, 2]
    sizes = table.counters[1, [Counter.AHEAD_BYTES, Counter.AHEAD_USED_BYTES]].tolist()
    assert sizes == [2 * (1 << 12) + offsets[2], 2 * (1 << 12)]
    assert decide(table, 1, *guess(3, 5, 1)).fate[0, 1].item() == Fate.HIT


def test_an_expert_that_came_in_part_is_read_from_both_places():
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, system=EXACT, staging=3, most_ahead=2)
    ((_, slot, _),) = foresee(table, 0, *guess(5))
    (addresses,) = decide(table, 0, *guess(5)).addresses[0].tolist()
    gate, up, down = table.offsets[HIGH].tolist()
    assert addresses == [slot + gate, slot + up, source(0, 5) + down]


def test_another_layers_guess_is_no_ones():
    """Three layers: the third one's guess takes the first one's slots."""
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, system=EXACT, staging=6, most_ahead=3)
    foresee(table, 0, *guess(5))
    table.staged_for[0] = 2
    assert decide(table, 0, *guess(5)).addresses[0, 0, 0] == source(0, 5)
    table.staged_for[0] = 0
    assert decide(table, 0, *guess(5)).addresses[0, 0, 0] != source(0, 5)
    table.forget_ahead()
    assert decide(table, 0, *guess(5)).addresses[0, 0, 0] == source(0, 5)


def test_a_version_that_the_step_does_not_want_is_of_no_use():
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, system=Dymoe(retention=0.5), staging=6, most_ahead=3)
    table.critical.fill_(1)
    foresee(table, 0, *guess(5, 7, 9))
    assert table.staged[0, :, 5].tolist() == [int(table.ahead[HIGH, 0]), HIGH, 3]
    decision = decide(table, 0, *guess(7, 9, 5))
    assert decision.tiers[0] == LOW
    assert decision.addresses[0, 0, 0] == source(0, 5, LOW)


def test_what_was_fetched_ahead_leaves_staging_slots_to_others():
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, system=EXACT, staging=3, most_ahead=3)
    foresee(table, 0, *guess(5))
    ids, weights = torch.tensor([[5, 6]] * 3), torch.full((3, 2), 0.5)
    assert decide(table, 0, ids, weights).slots[0, :2].tolist() == [-1, int(table.staging[HIGH, 0])]


def test_without_rows_nothing_is_fetched():
    table = make_table({LOW: [0, 0], HIGH: [0, 0]}, system=EXACT, staging=6, most_ahead=9)
    assert foresee(table, 1, *guess(5, 3), real=0) == []
    assert not table.staged.any()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, LAYERS - 1), st.integers(1, 4), st.integers(0, 1 << 30)), max_size=12),
    st.integers(0, EXPERTS),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(0, 12),
    st.integers(0, 24),
)
def test_rows_slots_and_tiers_are_those_without_guesses(steps, share, retention, staging, most_ahead):
    shares = {LOW: [share] * LAYERS, HIGH: [share] * LAYERS}
    plain, foreseeing = (
        make_table(shares, system=Dymoe(retention=retention), staging=staging, most_ahead=most)
        for most in (0, most_ahead)
    )
    for layer, tokens, seed in steps:
        foresee(foreseeing, layer, *random_step(seed // 3, tokens, TOP_K))
        ours, theirs = (decide(table, layer, *random_step(seed, tokens)) for table in (foreseeing, plain))
        for name in ("experts", "tiers", "fate", "bits", "work", "rows", "pairs", "computed"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        check_integrity(foreseeing.on_host(), ranges=True)
        for name in ("tier", "slot", "heat", "used_at"):
            assert torch.equal(getattr(foreseeing, name), getattr(plain, name)), name
