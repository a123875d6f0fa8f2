"""Single launches: tiles, split sums, weights, device-made lists, bytes touched."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.gpu.experts import section_of, section_offsets, table_of_slices
from tests.kernels.matrices import MIXED, in_one_section
from tests.kernels.sections import (
    DEVICE,
    TOLERANCE,
    Experts,
    at_the_edge,
    count_loads,
    decode,
    grouped,
    make_scratch,
    own_codes,
    poisoned,
    random_x,
    relative_error,
    run_backwards,
    sections_at_the_edge,
    some_widths,
    work_list,
)
from vllm_dymoe.experts.encoding import CODEBOOKS, FP8, MXFP4, NVFP4, PLAIN, STEPS
from vllm_dymoe.experts.format import DownFormat, ExpertFormat
from vllm_dymoe.kernels import Activation, dequantize
from vllm_dymoe.kernels.triton import (
    Codes,
    DecodeTile,
    ExpertShape,
    GroupedTile,
    Scratch,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.start import run_kernel

BFLOAT16, SILU = torch.bfloat16, Activation.SILU
FLOATS = [book.tag for book in CODEBOOKS.values()]
integers, floats = st.sampled_from([16, 8, 4, 2]), st.sampled_from(FLOATS)
both = st.tuples(integers, floats, integers | floats)
ORDERED = frozenset((8, 2))
WAYS = [DecodeTile(4, 2), DecodeTile(4, 1), GroupedTile(16, 64, 32, 4, 2), GroupedTile(32, 256, 16, 4, 2)]
HALVES = [
    (ExpertShape(150, 60, 32, BFLOAT16, nested=4), [4, 2, 16]),
    (ExpertShape(130, 70, 64, torch.float16, True, frozenset({4, 2}), frozenset({4, 2}), nested=4), [2, 4, 4]),
    (ExpertShape(270, 64, 128, BFLOAT16, nested=4), [4, 2]),
    (ExpertShape(150, 60, 64, BFLOAT16, True, frozenset(), frozenset({8, 4}), nested=8), [8, 4, 8]),
]


def routing(tokens, top_k, experts, seed=0):
    """Return ids [tokens][top_k], float32 weights, and (token, k) by expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).tolist()
    weights = torch.rand(tokens, top_k, generator=generator)
    chosen = [[(t, k) for t in range(tokens) for k in range(top_k) if ids[t][k] == e] for e in range(experts)]
    return ids, weights.to(DEVICE), chosen


def weighted_reference(experts, ids, weights, x, activation, skipped=()):
    """Return the expected float64 [tokens, hidden]."""
    want = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(ids):
        for k, expert in enumerate(row):
            if (t, k) not in skipped:
                want[t] += float(weights[t, k]) * experts.reference(expert, x[t : t + 1], activation)[0]
    return want


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    **MIXED | {"hidden": st.integers(40, 270)},
    bits=both.map(lambda three: three[::-1]),  # the first one has no token
    tokens=st.sampled_from([1, 3]),
    steps=some_widths,
    act_order=some_widths,
    down=own_codes,
    tile=st.builds(DecodeTile, st.sampled_from([4, 8]), st.sampled_from([1, 2, 3])),
)
def test_the_weighted_sum(bits, tokens, activation, steps, act_order, down, tile, seed, **sizes):
    """Any precisions in one launch, in any number of parts.

    One expert of each token is left out.
    """
    flags = {"integer_zeros": steps, "act_order": act_order, "has_gate": activation.has_gate}
    shape = ExpertShape(**sizes, **flags, down=down and Codes(frozenset(bits), *down))
    experts, hidden, dtype = Experts(shape, bits, seed), shape.hidden, shape.dtype
    x = random_x(tokens, hidden, dtype, seed)
    ids, weights, chosen = routing(tokens, 2, 3, seed)
    chosen[0] = []
    skipped = {(t, k) for t in range(tokens) for k in range(2) if ids[t][k] == 0}
    computed = torch.tensor([[int((t, k) not in skipped) for k in range(2)] for t in range(tokens)], dtype=torch.int32)
    weighting = Weighting(weights, computed.to(DEVICE))
    _, out = decode(x, experts.table(), work_list(chosen, 2), tokens, tile, activation, weighting)
    want = weighted_reference(experts, ids, weights, x, activation, skipped)
    assert relative_error(out, want) < TOLERANCE[dtype]


tiles = st.builds(
    GroupedTile,
    block_m=st.sampled_from([16, 32, 64, 128]),
    block_n=st.sampled_from([64, 128]),
    block_k=st.sampled_from([16, 32, 64]),
    warps=st.just(4),
    stages=st.just(2),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    **MIXED,
    bits=both,
    tokens=st.sampled_from([1, 17, 70]),
    steps=some_widths,
    act_order=some_widths,
    down=own_codes,
    tile=tiles,
)
def test_any_tile_agrees_with_the_reference(bits, tokens, activation, steps, act_order, down, tile, seed, **sizes):
    flags = {"integer_zeros": steps, "act_order": act_order, "has_gate": activation.has_gate}
    shape = ExpertShape(**sizes, **flags, down=down and Codes(frozenset(bits), *down))
    experts, hidden, dtype = Experts(shape, bits, seed), shape.hidden, shape.dtype
    x = random_x(tokens, hidden, dtype, seed)
    count = len(bits)
    chosen = [[(t, e) for t in range(tokens) if (t + e) % (e + 1) == 0] for e in range(count)]
    work = work_list(chosen, count, tile.block_m)
    _, out = grouped(x, experts.table(), work, tokens * count, tile, activation)
    for expert, pairs in enumerate(chosen):
        rows = [token for token, _ in pairs]
        got = out.view(tokens, count, hidden)[:, expert]
        want = experts.reference(expert, x[rows], activation)
        assert not rows or relative_error(got[rows], want) < TOLERANCE[dtype], bits[expert]
        others = [t for t in range(tokens) if t not in rows]
        assert bool(got[others].isnan().all()), "rows of no pair were written"


@pytest.mark.parametrize("book", [MXFP4, NVFP4, FP8], ids=lambda book: book.name)
def test_every_code_is_its_level(book):
    """A matrix has each code at each position of a word.

    It is multiplied by unit vectors, so that no sum hides a wrong value.
    """
    shape = ExpertShape(64, 256, 32, torch.bfloat16)
    experts = Experts(shape, [book.tag])
    down = experts.matrices[0][2]
    x = torch.eye(256).bfloat16().to(DEVICE)
    work = work_list([[(t, 0) for t in range(256)]], 1, 16)
    out = poisoned(256, 64, dtype=torch.bfloat16)
    grouped_down(x, out, experts.table(), work, GroupedTile(16, 64, 64, 4, 2))
    # MXFP4 weights are exact in bfloat16. Others are rounded, and the interpreter may round to the other neighbour.
    tolerance = 0 if book is MXFP4 else 2**-7
    assert torch.allclose(out.t().cpu(), dequantize(down, torch.bfloat16), rtol=tolerance, atol=0)


def test_the_order_of_programs_changes_no_bit():
    """If the items are in another order, another program arrives last."""
    experts = Experts(ExpertShape(130, 64, 32, BFLOAT16), [4, 2, 4])
    x = random_x(2, 130, BFLOAT16)
    _, weights, chosen = routing(2, 3, 3)
    work = work_list(chosen, 3)
    weighting = Weighting(weights, torch.ones(2, 3, dtype=torch.int32, device=DEVICE))
    results = []
    for items in (work.items, work.items.flip(0)):
        turned = WorkList(items.contiguous(), work.rows, work.pairs)
        results.append(decode(x, experts.table(), turned, 2, weighting=weighting)[1])
    assert torch.equal(*results)
    assert not results[0].isnan().any()


BIG = 2.0**30


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_are_added_in_ascending_order(weighted, fetched):
    """In float32, 1 + 2^30 - 2^30 is 0 in this order.

    It is 1 in any order that does not start with the 1 and a large number.
    """
    experts = Experts(ExpertShape(384, 384, 32, BFLOAT16), [16])
    for packed in experts.matrices[0]:
        packed.weight.fill_(1)
    packed_bytes = torch.cat([packed.weight.view(torch.uint8).flatten() for packed in experts.matrices[0]])
    experts.slices[0][: packed_bytes.numel()].copy_(packed_bytes)
    x = torch.zeros(1, 384, dtype=BFLOAT16)
    x[0, [0, 128, 256]] = torch.tensor([1, BIG, -BIG], dtype=BFLOAT16)
    work, tile, scratch = work_list([[(0, 0)]], 1), DecodeTile(4, 3), make_scratch()
    slot = torch.zeros_like(experts.slices[0])
    table = experts.table([slot.data_ptr()] if fetched else None)
    hidden, out = poisoned(1, 384, dtype=BFLOAT16), poisoned(1, 384, dtype=BFLOAT16)
    decode_gate_up(x.to(DEVICE), hidden, table, work, SILU, tile, scratch)
    assert not hidden.any()
    ones = torch.ones(1, 1, device=DEVICE)
    weighting = Weighting(ones, ones.int()) if weighted else None
    decode_down(x.to(DEVICE), out, table, work, tile, scratch, weighting)
    assert not out.any()


def test_experts_are_added_in_ascending_order():
    """In any other order the first expert's output would remain.

    The router's weights are 1 and two large numbers that cancel.
    """
    experts = Experts(ExpertShape(64, 64, 32, BFLOAT16), [4])
    work = work_list([[(0, 0), (0, 1), (0, 2)]], 3, step=1)
    weighting = Weighting(
        torch.tensor([[1, BIG, -BIG]], device=DEVICE), torch.ones(1, 3, dtype=torch.int32, device=DEVICE)
    )
    _, out = decode(random_x(1, 64, BFLOAT16), experts.table(), work, 1, DecodeTile(4, 1), weighting=weighting)
    assert not out.any()


def test_nothing_is_summed_before_the_last_expert_has_come():
    """A sum taken too early would write something.

    Unlike the output, missing partial sums are not NaN.
    """
    experts = Experts(ExpertShape(64, 64, 32, BFLOAT16), [4, 2])
    x, work, scratch = random_x(1, 64, BFLOAT16), work_list([[(0, 0)], [(0, 1)]], 2), make_scratch(held=0.0)
    table, tile = experts.table(), DecodeTile(4, 1)
    weighting = Weighting(torch.ones(1, 2, device=DEVICE), torch.ones(1, 2, dtype=torch.int32, device=DEVICE))
    hidden, out = poisoned(2, 64, dtype=BFLOAT16), poisoned(1, 64, dtype=BFLOAT16)
    decode_gate_up(x, hidden, table, work, SILU, tile, scratch)
    for item in (1, 0):
        assert bool(out.isnan().all())
        part = WorkList(work.items[item : item + 1].contiguous(), work.rows, work.pairs)
        decode_down(hidden, out, table, part, tile, scratch, weighting)
    want = sum(experts.reference(expert, x, SILU) for expert in range(2))
    assert relative_error(out, want) < TOLERANCE[BFLOAT16]


def test_nothing_is_summed_before_the_last_part_has_come():
    """The parts are columns; the last of three programs is not started."""
    experts = Experts(ExpertShape(384, 384, 32, BFLOAT16), [4])
    x, work, scratch = random_x(1, 384, BFLOAT16), work_list([[(0, 0)]], 1), make_scratch(held=0.0)
    table, tile = experts.table(), DecodeTile(4, 3)

    def without_the_last(kernel, grid, *rest):
        run_kernel(kernel, (*grid[:2], grid[2] - 1), *rest)

    hidden, out = poisoned(1, 384, dtype=BFLOAT16), poisoned(1, 384, dtype=BFLOAT16)
    decode_gate_up(x, hidden, table, work, SILU, tile, scratch, start=without_the_last)
    assert bool(hidden.isnan().all())
    scratch.semaphores.zero_()
    decode_down(x, out, table, work, tile, scratch, start=without_the_last)
    assert bool(out.isnan().all())


def test_positions_of_no_item_are_left_alone():
    """Positions after an item keep their contents.

    They belong to other items, or to none.
    """
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


def never(*arguments):
    raise AssertionError("launched")


SHAPE = ExpertShape(64, 64, 32, BFLOAT16)


def test_a_limit_of_registers_reaches_the_compiler():
    """Programs of 8 warps are exempt, since only one would fit."""
    experts, work = Experts(SHAPE, [4]), work_list([[(0, 0)]], 1)
    x, slot, started = random_x(1, 64, BFLOAT16), torch.zeros_like(experts.slices[0]), []

    def start(kernel, grid, tensors, constants, options):
        started.append(options)

    for table in (experts.table(), experts.table([slot.data_ptr()])):
        for tile in (DecodeTile(4, 1), DecodeTile(4, 1, 96), DecodeTile(8, 1, 96)):
            decode_gate_up(x, x, table, work, SILU, tile, make_scratch(), start=start)
            decode_down(x, x, table, work, tile, make_scratch(), start=start)
    four, limited, eight = {"num_warps": 4}, {"num_warps": 4, "maxnreg": 96}, {"num_warps": 8}
    assert started == [four, four, limited, limited, eight, eight] * 2


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("partials", "semaphores", "sentence"),
    [
        (127, 1, "partials has 127 elements"),
        (128, 0, "semaphores has 0 elements"),
    ],
)
def test_too_little_scratch_of_down_is_named(weighted, partials, semaphores, sentence):
    """The 64 rows are computed in two parts, or for two experts."""
    ones = torch.ones(1, 2, device=DEVICE)
    weighting, tile = (Weighting(ones, ones.int()), DecodeTile(4, 1)) if weighted else (None, DecodeTile(4, 2))
    scratch = Scratch(torch.zeros(partials, device=DEVICE), torch.zeros(semaphores, dtype=torch.int32, device=DEVICE))
    x = torch.zeros(1, 64, dtype=BFLOAT16, device=DEVICE)
    table, work = Experts(SHAPE, [4]).table(), work_list([[(0, 0)]], 1)
    with pytest.raises(ValueError, match=sentence):
        decode_down(x, x, table, work, tile, scratch, weighting, start=never)


@pytest.mark.skipif(DEVICE != "cpu", reason="compute-sanitizer looks for the same on a GPU")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("shape", "bits"),
    [
        *((ExpertShape(100, 70, 32, dtype, True, act_order=ORDERED), [16, 8, 4, 2]) for dtype in TOLERANCE),
        HALVES[1],
        HALVES[3],
    ],
)
def test_nothing_beside_the_tensors_is_touched(shape, bits, way):
    """Memory ends after each tensor and each section.

    Sizes are no multiples of a tile, and the number of tokens is odd.
    """
    experts, copies, count = Experts(shape, bits), [], len(bits)
    table, x = sections_at_the_edge(experts, copies), at_the_edge(random_x(3, shape.hidden, shape.dtype))
    work = work_list([[(t, e) for t in range(3)] for e in range(count)], count, getattr(way, "block_m", 2))
    work = WorkList(*(at_the_edge(part) for part in (work.items, work.rows, work.pairs)))
    if isinstance(way, GroupedTile):
        _, out = grouped(x, table, work, 3 * count, way, place=at_the_edge)
        assert not out.isnan().any()
        return
    # Tiles of 64 rows, for each position and each part; gate and up have one sum each.
    blocks = 3 * count * -(-shape.hidden // 64)
    scratch = Scratch(
        at_the_edge(torch.full((blocks * way.split * 128,), torch.nan)),
        at_the_edge(torch.zeros(blocks, dtype=torch.int32)),
    )
    hidden = at_the_edge(poisoned(3 * count, shape.intermediate, dtype=shape.dtype))
    decode_gate_up(x, hidden, table, work, SILU, way, scratch)
    weighting = None
    if way.split == 1:
        ones = at_the_edge(torch.ones(3, count))
        weighting = Weighting(ones, at_the_edge(torch.ones(3, count, dtype=torch.int32)))
    out = at_the_edge(poisoned(3 * count if weighting is None else 3, shape.hidden, dtype=shape.dtype))
    decode_down(hidden, out, table, work, way, scratch, weighting)
    assert not out.isnan().any()


@pytest.mark.parametrize(
    ("bits", "hidden", "intermediate", "group_size", "tokens", "bias", "tile"),
    [
        ([16, 8, 4, 2, 4], 300, 70, 32, 1, False, DecodeTile(4, 3)),
        ([16, 8, 4, 2, 4], 65, 64, 128, 3, True, DecodeTile(4, 1)),
        ([*FLOATS, 2], 200, 70, 32, 2, True, DecodeTile(4, 2)),
        ([*FLOATS, 2], 200, 70, 32, 2, False, DecodeTile(4, 2)),
        # The first part has 384 of 768 columns, one group and a half.
        ([FP8.tag, 2], 520, 70, 256, 2, False, DecodeTile(4, 2)),
    ],
)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_fetched_is_the_source_and_changes_no_bit(
    monkeypatch, bits, hidden, intermediate, group_size, tokens, bias, tile, backwards
):
    """Every byte of the packed expert arrives, and none outside of it.

    Padding arrives as well, and the output equals that of the slot. This also holds when programs run in the other
    order: none reads what only another one has fetched.
    """
    experts = Experts(ExpertShape(hidden, intermediate, group_size, BFLOAT16, bias), bits)
    x = random_x(tokens, hidden, BFLOAT16)
    chosen = [[(t, e) for t in range(tokens)] for e in range(len(bits))]
    slots = [
        torch.full((packed_bytes.numel() + 32,), 0xEE, dtype=torch.uint8, device=DEVICE)
        for packed_bytes in experts.slices
    ]
    # The last expert is already resident.
    targets = [slot.data_ptr() + 16 for slot in slots[:-1]] + [0]
    assert all(address % 16 == 0 for address in targets)
    whole = work_list(chosen, len(bits), step=tokens)
    if backwards:
        run_backwards(monkeypatch)
    hidden_states, out = decode(x, experts.table(targets), whole, tokens * len(bits), tile)
    monkeypatch.undo()
    for slot, packed_bytes in zip(slots[:-1], experts.slices, strict=False):
        assert torch.equal(slot[16:-16], packed_bytes)
        assert bool((slot[:16] == 0xEE).all())
        assert bool((slot[-16:] == 0xEE).all())
    assert bool((slots[-1] == 0xEE).all())
    starts = [slot.data_ptr() + 16 for slot in slots[:-1]] + [experts.slices[-1].data_ptr()]
    again = table_of_slices(experts.shape, starts, bits, DEVICE)
    slot_states, slot_out = decode(x, again, whole, tokens * len(bits), tile)
    assert torch.equal(hidden_states, slot_states)
    assert torch.equal(out, slot_out)
    for expert in range(len(bits)):
        want = experts.reference(expert, x, SILU)
        assert relative_error(out.view(tokens, len(bits), -1)[:, expert], want) < TOLERANCE[BFLOAT16]


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter loads")
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_each_byte_is_read_once(bits, monkeypatch):
    """For any token, each byte of a fetched expert crosses the link once.

    It is computed from its copy, and a resident one from its slot. Only an order of columns, here at 8 and 2 bits, is
    fetched by each block of 64 rows, of which there are two.
    """
    experts = Experts(ExpertShape(100, 70, 32, BFLOAT16, True, act_order=ORDERED), [bits])
    x, work = random_x(2, 100, BFLOAT16), work_list([[(0, 0), (1, 0)]], 1)
    slot = torch.zeros_like(experts.slices[0])
    counts = count_loads(monkeypatch, experts.slices[0])
    decode(x, experts.table([slot.data_ptr()]), work, 2)
    for fmt, offset in zip(experts.shape.formats(bits), section_offsets(experts.shape, bits), strict=True):
        assert (counts[offset : offset + fmt.order_offset] == 1).all()
        assert (counts[offset + fmt.order_offset : offset + fmt.nbytes] == 2).all()
    counts[:] = 0
    decode(x, experts.table(), work, 2)
    for fmt, offset in zip(experts.shape.formats(bits), section_offsets(experts.shape, bits), strict=True):
        assert (counts[offset : offset + fmt.weight_bytes] == 1).all()


def test_empty_items_are_nothing():
    """A list made on the device has room for more items than it uses."""
    experts = Experts(ExpertShape(64, 64, 32, BFLOAT16), [4])
    x = random_x(1, 64, BFLOAT16)
    work = work_list([[(0, 0)]], 1)
    want = decode(x, experts.table(), work, 1)[1]
    items = torch.cat([work.items, torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)])
    assert torch.equal(decode(x, experts.table(), WorkList(items, work.rows, work.pairs), 1)[1], want)


def in_single_sections(experts):
    whole = object.__new__(Experts)
    whole.shape, whole.bits, whole.matrices, whole.slices, whole.residual = (
        replace(experts.shape, nested=0),
        [],
        [],
        [],
        [],
    )
    for width, three in zip(experts.bits, experts.matrices, strict=True):
        if width == experts.shape.nested:
            three = list(map(in_one_section, three))
            whole.bits.append(width)
            whole.matrices.append(three)
            whole.slices.append(torch.cat(list(map(section_of, three))).to(DEVICE))
    return whole


@pytest.mark.parametrize("compute", [decode, grouped])
@pytest.mark.parametrize(("shape", "bits"), HALVES)
def test_any_mix_agrees_with_the_reference_and_whole_codes_keep_their_bits(shape, bits, compute):
    experts, count = Experts(shape, bits), len(bits)
    x = random_x(3, shape.hidden, shape.dtype)
    tokens = [[(t, e) for t in range(3) if t != e] for e in range(count)]
    out = compute(x, experts.table(), work_list(tokens, count), 3 * count)[1].view(3, count, -1)
    nested = [e for e in range(count) if bits[e] == shape.nested]
    for e in range(count):
        rows = [t for t, _ in tokens[e]]
        assert relative_error(out[rows, e], experts.reference(e, x[rows], SILU)) < TOLERANCE[shape.dtype], bits[e]
    single = in_single_sections(experts)
    alike = work_list([tokens[e] for e in nested], count)
    same = compute(x, single.table(), alike, 3 * count)[1].view(3, count, -1)
    for e in nested:
        rows = [t for t, _ in tokens[e]]
        assert torch.equal(out[rows, e], same[rows, e])


@pytest.mark.parametrize(("shape", "bits"), [HALVES[0], (replace(HALVES[1][0], hidden=70), [2, 4]), *HALVES[2:]])
def test_either_section_is_fetched_by_itself_or_both(shape, bits):
    """An expert arrives whole, as its base or its residual slice, or is resident."""
    experts, count = Experts(shape, bits), len(bits)
    x, work = random_x(1, shape.hidden, shape.dtype), work_list([[(0, e)] for e in range(count)], count)
    want = decode(x, experts.table(), work, count)[1]
    for base, residual in ((True, True), (False, True), (True, False), (False, False)):
        slots = [torch.zeros_like(packed_bytes) for packed_bytes in experts.slices]
        residual_slots = [torch.zeros_like(packed_bytes) for packed_bytes in experts.residual]
        table = experts.table(
            [slot.data_ptr() if base else 0 for slot in slots],
            [slot.data_ptr() if residual and slot.numel() else 0 for slot in residual_slots],
        )
        assert torch.equal(decode(x, table, work, count)[1], want)
        for stored, there in ((slots, base), (residual_slots, residual)):
            source = experts.slices if stored is slots else experts.residual
            for slot, packed_bytes in zip(stored, source, strict=True):
                assert torch.equal(slot, packed_bytes if there else torch.zeros_like(packed_bytes))


def test_whole_codes_and_halves_of_the_same_bits_cannot_share_a_launch():
    nested, whole = ExpertShape(64, 64, 32, BFLOAT16, nested=4), ExpertShape(64, 64, 32, BFLOAT16)
    with pytest.raises(ValueError, match="halves"):
        ExpertShape.of([nested.formats(4), whole.formats(2)])
    with pytest.raises(ValueError, match="residual is missing"):
        table_of_slices(nested, [0x1000], [4], DEVICE)
    with pytest.raises(ValueError, match="residual_destinations"):
        table_of_slices(nested, [0x1000], [4], DEVICE, [0x2000], [0x3000])


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        ({"group_size": 64}, "different group sizes"),
        ({"intermediate": 96}, "different intermediate sizes"),
        ({"bias": True}, "without a bias"),
        ({"integer_zeros": True}, "integer zeros or a column order"),
        ({"act_order": True}, "integer zeros or a column order"),
    ],
)
def test_experts_that_disagree_cannot_share_a_launch(second, sentence):
    fmt = ExpertFormat(64, 64, STEPS[4], 32, BFLOAT16)
    with pytest.raises(ValueError, match=sentence):
        ExpertShape.of([fmt.matrices, replace(fmt, **second).matrices])


NONE = frozenset()


@pytest.mark.parametrize(
    ("down", "own"),
    [
        ({}, None),
        ({"encoding": PLAIN}, Codes(frozenset({16}), 32, NONE, NONE)),
        ({"encoding": MXFP4}, Codes(frozenset({MXFP4.tag}), 32, NONE, NONE)),
        ({"encoding": STEPS[8], "integer_zeros": True}, Codes(frozenset({8}), 32, frozenset({8}), NONE)),
        ({"encoding": FP8, "group_size": 128}, Codes(frozenset({FP8.tag}), 128, NONE, NONE)),
        ({"group_size": 64}, Codes(frozenset({4}), 64, NONE, NONE)),
        ({"act_order": True}, Codes(frozenset({4}), 32, NONE, frozenset({4}))),
    ],
)
def test_launches_of_down_are_compiled_for_its_own_codes(down, own):
    fmt = ExpertFormat(96, 64, STEPS[4], 32, BFLOAT16)
    formats = replace(fmt, down=DownFormat(**{"encoding": STEPS[4], "group_size": 32} | down)).matrices
    shape = ExpertShape.of([formats])
    assert shape.down == own
    gate_up = Codes(frozenset({4}), 32, NONE, NONE)
    assert shape.codes(frozenset({4})) == (gate_up, own or gate_up)
    assert shape.formats(4)[:2] == fmt.matrices[:2]
