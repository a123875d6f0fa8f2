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
from vllm_dymoe.kernels import Activation, dequantize
from vllm_dymoe.kernels.triton import (
    DOWN,
    GATE,
    UP,
    ExpertShape,
    GroupedTile,
    WorkList,
    choose_tiles,
    grouped_gate_up,
    grouped_linear,
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
    grouped_linear(inner, out, experts.table(), work, DOWN, tile, scatter=True)
    for expert, pairs in enumerate(chosen):
        rows = [token for token, _ in pairs]
        got = out.view(tokens, count, hidden)[:, expert]
        want = experts.reference(expert, x[rows], activation)
        assert not rows or relative_error(got[rows], want) < TOLERANCE[dtype], bits[expert]
        others = [t for t in range(tokens) if t not in rows]
        assert bool(got[others].isnan().all()), "rows of nobody were written"


@pytest.mark.parametrize("bits", [16, 8, 4, 2])
@pytest.mark.parametrize("projection", [GATE, UP, DOWN])
def test_one_projection_at_a_time(bits, projection):
    """As the streaming pipeline computes a projection when it arrives: the others' addresses are not even valid."""
    shape = ExpertShape(100, 70, 32, torch.float16, True)
    experts = Experts(shape, [bits])
    table = experts.table()
    for other in {GATE, UP, DOWN} - {projection}:
        table.addresses[:, other] = 0
    packed = experts.matrices[0][projection]
    x = random_x(20, packed.format.columns, torch.float16)
    work = work_list([[(t, 0) for t in range(19, 2, -1)]], 1, 16)
    tile = GroupedTile(16, 64, 32, 4, 2)
    out = poisoned(20, packed.format.rows, dtype=torch.float16)
    grouped_linear(x, out, table, work, projection, tile, gather=True, scatter=True)
    want = x.cpu().double() @ dequantize(packed, torch.float64).t() + packed.bias.double()
    assert relative_error(out[3:], want[3:]) < TOLERANCE[torch.float16]
    assert bool(out[:3].isnan().all())
    packed_rows = poisoned(17, packed.format.rows, dtype=torch.float16)
    grouped_linear(x, packed_rows, table, work, projection, tile, gather=True)
    assert torch.equal(packed_rows, out[3:].flip(0))


@pytest.mark.parametrize(
    ("steps", "act_order", "bias", "dtype"),
    [({4}, {8, 4}, False, torch.float16), ({8, 2}, {2}, True, torch.bfloat16)],
)
def test_what_other_tools_quantized_at_some_bits_and_not_at_others(steps, act_order, bias, dtype):
    """A checkpoint's integers beside a tier derived from them."""
    flags = frozenset(steps), frozenset(act_order)
    experts = Experts(ExpertShape(100, 70, 32, dtype, bias, *flags), [8, 4, 2, 16])
    x, tile = random_x(5, 100, dtype), GroupedTile(16, 64, 32, 4, 2)
    work = work_list([[(t, e) for t in range(5)] for e in range(4)], 4, 16)
    inner, out = poisoned(20, 70, dtype=dtype), poisoned(20, 100, dtype=dtype)
    grouped_gate_up(x, inner, experts.table(), work, Activation.SILU, tile)
    grouped_linear(inner, out, experts.table(), work, DOWN, tile, scatter=True)
    for expert in range(4):
        got = out.view(5, 4, 100)[:, expert]
        assert relative_error(got, experts.reference(expert, x, Activation.SILU)) < TOLERANCE[dtype]


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
    grouped_linear(inner, out, table, work, DOWN, tile, scatter=True)
    assert not out.isnan().any()


def test_positions_of_nobody_are_left_alone():
    """Behind every item lie positions of others, or of none: they keep what they held."""
    experts = Experts(ExpertShape(64, 64, 32, torch.bfloat16), [4, 2])
    tile = GroupedTile(16, 64, 32, 4, 2)
    items = torch.tensor([[0, 1, 3], [1, 4, 7]], dtype=torch.int32, device=DEVICE)
    index = torch.arange(8, device=DEVICE)
    work = WorkList(items, index, index)
    x = random_x(8, 64, torch.bfloat16)
    inner, out, placed = (poisoned(8, 64, dtype=torch.bfloat16) for _ in range(3))
    grouped_gate_up(x, inner, experts.table(), work, Activation.SILU, tile)
    grouped_linear(x, out, experts.table(), work, DOWN, tile, scatter=True)
    grouped_linear(x, placed, experts.table(), work, UP, tile, gather=True)
    for result in (inner, out, placed):
        assert result.isnan().all(1).tolist() == [True, False, False, True, False, False, False, True]
        assert not result[[1, 2, 4, 5, 6]].isnan().any()


def test_no_items_are_no_launch():
    """A GPU refuses a grid without programs."""

    def never(*arguments):
        raise AssertionError("launched")

    table, work = Experts(ExpertShape(64, 64, 32, torch.bfloat16), [4]).table(), work_list([[]], 1)
    nothing, tile = poisoned(0, 64, dtype=torch.bfloat16), GroupedTile(16, 64, 32, 4, 2)
    grouped_gate_up(nothing, nothing, table, work, Activation.SILU, tile, start=never)
    grouped_linear(nothing, nothing, table, work, DOWN, tile, start=never)


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
    tile = choose_tiles(90, 64, 64).grouped_linear[0]
    work = schedule(ids, 3, tile.block_m)
    inner = poisoned(work.positions, 64, dtype=torch.bfloat16)
    out = poisoned(8, 64, dtype=torch.bfloat16)
    grouped_gate_up(x, inner, experts.table(), work, Activation.SILU, tile)
    grouped_linear(inner, out, experts.table(), work, DOWN, tile, scatter=True)
    for token, row in enumerate(ids.tolist()):
        for k, expert in enumerate(row):
            got = out[2 * token + k : 2 * token + k + 1]
            if expert < 0:
                assert bool(got.isnan().all())
            else:
                want = experts.reference(expert, x[token : token + 1], Activation.SILU)
                assert relative_error(got, want) < TOLERANCE[torch.bfloat16]


def test_wrong_arguments_are_named():
    experts = Experts(ExpertShape(64, 96, 32, torch.bfloat16), [4])
    work, tile = work_list([[(0, 0)]], 1, 16), GroupedTile(16, 64, 32, 4, 2)
    x = random_x(1, 64, torch.bfloat16)
    out = poisoned(1, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="projection is 3"):
        grouped_linear(x, out, experts.table(), work, 3, tile)
    with pytest.raises(ValueError, match=r"x has shape \[1, 64\], expected \[1, 96\]"):
        grouped_linear(x, out, experts.table(), work, DOWN, tile)
    with pytest.raises(TypeError, match=r"out is torch.float16"):
        grouped_linear(x, out.half(), experts.table(), work, GATE, tile)
    with pytest.raises(ValueError, match="hidden has shape"):
        grouped_gate_up(x, out[:, :64].contiguous(), experts.table(), work, Activation.SILU, tile)
    with pytest.raises(ValueError, match="table has destinations"):
        grouped_gate_up(x, out, experts.table([0]), work, Activation.SILU, tile)
    with pytest.raises(ValueError, match="table has destinations"):
        grouped_linear(x, out, experts.table([0]), work, GATE, tile)


def test_wrong_routings_are_named():
    ids = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(TypeError, match=r"expert_ids is torch.float32, expected torch.int32 or torch.int64"):
        schedule(ids.float(), 3, 2)
    with pytest.raises(ValueError, match=r"expert_ids has shape \[4\]"):
        schedule(ids.view(4), 3, 2)
    with pytest.raises(ValueError, match="step is 0, expected at least 1"):
        schedule(ids, 3, 0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"block_m": 8}, "block_m is 8, expected a power of two from 16 on"),
        ({"block_n": 96}, "block_n is 96, expected a power of two from 64 on"),
        ({"block_k": 48}, "block_k is 48, expected a power of two from 16 on"),
        ({"warps": 16}, "warps is 16, expected 4 or 8"),
        ({"stages": 0}, "stages is 0, expected at least 1"),
    ],
)
def test_wrong_tiles_are_named(wrong, sentence):
    """As they may come from a table that somebody edited."""
    right = {"block_m": 16, "block_n": 64, "block_k": 32, "warps": 4, "stages": 2}
    GroupedTile(**right)
    with pytest.raises(ValueError, match=sentence):
        GroupedTile(**right | wrong)
