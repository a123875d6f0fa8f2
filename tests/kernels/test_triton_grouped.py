"""The grouped launches by themselves: every tile, one projection at a time, one expert at a time."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.matrices import ACTIVATIONS
from tests.kernels.sections import (
    DEVICE,
    TOLERANCE,
    Experts,
    at_the_edge,
    poisoned,
    random_x,
    relative_error,
    sections_at_the_edge,
    some_widths,
    work_list,
)
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import (
    ExpertShape,
    GroupedTile,
    WorkList,
    choose_tiles,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.schedule import schedule

tiles = st.builds(
    GroupedTile,
    block_m=st.sampled_from([16, 32, 64, 128]),
    block_n=st.sampled_from([64, 128]),
    block_k=st.sampled_from([16, 32, 64]),
    warps=st.just(4),
    stages=st.just(2),
)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bits=st.lists(st.sampled_from([16, 8, 4, 2]), min_size=1, max_size=4),
    tokens=st.sampled_from([1, 17, 70]),
    hidden=st.integers(20, 200),
    intermediate=st.integers(20, 200),
    group_size=st.sampled_from([32, 64, 128, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    steps=some_widths,
    act_order=some_widths,
    tile=tiles,
    seed=st.integers(0, 1000),
)
def test_any_tile_agrees_with_the_reference(
    bits, tokens, hidden, intermediate, group_size, dtype, activation, bias, steps, act_order, tile, seed
):
    shape = ExpertShape(hidden, intermediate, group_size, dtype, bias, steps, act_order, activation.has_gate)
    experts = Experts(shape, bits, seed)
    x = random_x(tokens, hidden, dtype, seed)
    count = len(bits)
    chosen = [[(t, e) for t in range(tokens) if (t + e) % (e + 1) == 0] for e in range(count)]
    work = work_list(chosen, count, tile.block_m)
    inner = poisoned(work.positions, intermediate, dtype=dtype)
    grouped_gate_up(x, inner, experts.table(), work, activation, tile)
    out = poisoned(tokens * count, hidden, dtype=dtype)
    grouped_down(inner, out, experts.table(), work, tile)
    for expert, pairs in enumerate(chosen):
        rows = [token for token, _ in pairs]
        got = out.view(tokens, count, hidden)[:, expert]
        want = experts.reference(expert, x[rows], activation)
        assert not rows or relative_error(got[rows], want) < TOLERANCE[dtype], bits[expert]
        others = [t for t in range(tokens) if t not in rows]
        assert bool(got[others].isnan().all()), "rows of no pair were written"


@pytest.mark.skipif(DEVICE != "cpu", reason="compute-sanitizer looks for the same on a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", [GroupedTile(16, 64, 32, 4, 2), GroupedTile(32, 256, 16, 4, 2)])
def test_nothing_beside_the_tensors_is_touched(dtype, tile):
    """Sizes off every tile, more rows in a tile than there are, and memory that ends behind each tensor and section."""
    shape = ExpertShape(100, 70, 32, dtype, True, act_order=frozenset((8, 2)))
    experts, copies = Experts(shape, [16, 8, 4, 2]), []
    table = sections_at_the_edge(experts, copies)
    x = at_the_edge(random_x(5, 100, dtype))
    work = work_list([[(t, e) for t in range(5)] for e in range(4)], 4, tile.block_m)
    work = WorkList(*(at_the_edge(part) for part in (work.items, work.rows, work.pairs)))
    inner = at_the_edge(poisoned(20, 70, dtype=dtype))
    grouped_gate_up(x, inner, table, work, Activation.SILU, tile)
    out = at_the_edge(poisoned(20, 100, dtype=dtype))
    grouped_down(inner, out, table, work, tile)
    assert not out.isnan().any()


def test_positions_of_no_item_are_left_alone():
    """Behind every item lie positions of others, or of none: they keep what they held."""
    experts = Experts(ExpertShape(64, 64, 32, torch.bfloat16), [4, 2])
    tile = GroupedTile(16, 64, 32, 4, 2)
    items = torch.tensor([[0, 1, 3], [1, 4, 7]], dtype=torch.int32, device=DEVICE)
    index = torch.arange(8, device=DEVICE)
    work = WorkList(items, index, index)
    x = random_x(8, 64, torch.bfloat16)
    inner, out = (poisoned(8, 64, dtype=torch.bfloat16) for _ in range(2))
    grouped_gate_up(x, inner, experts.table(), work, Activation.SILU, tile)
    grouped_down(x, out, experts.table(), work, tile)
    for result in (inner, out):
        assert result.isnan().all(1).tolist() == [True, False, False, True, False, False, False, True]
        assert not result[[1, 2, 4, 5, 6]].isnan().any()


@pytest.mark.parametrize("step", [2, 16])
def test_a_schedule_made_on_the_device(step):
    """The same positions as on the host, whatever the routing; negative experts are left out."""
    ids = torch.tensor([[3, 1], [1, -1], [1, 0], [3, 1], [1, 3]], dtype=torch.int32, device=DEVICE)
    work = schedule(ids, 5, step)
    found = {}
    for expert, first, last in work.items.tolist():
        assert last - first <= step
        for position in range(first, last):
            found.setdefault(expert, []).append((int(work.rows[position]), int(work.pairs[position])))
    assert found == {0: [(2, 5)], 1: [(0, 1), (1, 2), (2, 4), (3, 7), (4, 8)], 3: [(0, 0), (3, 6), (4, 9)]}


def test_a_schedule_drives_a_launch():
    experts = Experts(ExpertShape(64, 64, 32, torch.bfloat16), [4, 2, 16])
    x = random_x(4, 64, torch.bfloat16)
    ids = torch.tensor([[0, 1], [2, 1], [-1, 0], [2, 0]], device=DEVICE)
    tile = choose_tiles(90, 64, 64).grouped_down[0]
    work = schedule(ids, 3, tile.block_m)
    inner = poisoned(work.positions, 64, dtype=torch.bfloat16)
    out = poisoned(8, 64, dtype=torch.bfloat16)
    grouped_gate_up(x, inner, experts.table(), work, Activation.SILU, tile)
    grouped_down(inner, out, experts.table(), work, tile)
    for token, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            got = out[2 * token + k : 2 * token + k + 1]
            if expert < 0:
                assert bool(got.isnan().all())
            else:
                want = experts.reference(expert, x[token : token + 1], Activation.SILU)
                assert relative_error(got, want) < TOLERANCE[torch.bfloat16]
