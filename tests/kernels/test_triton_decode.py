"""The decode launches by themselves: split sums, the router's weights, fetching through, device-side work lists."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.gpu.experts import section_offsets, table_of_blobs
from tests.kernels.matrices import ACTIVATIONS
from tests.kernels.sections import (
    DEVICE,
    TOLERANCE,
    Experts,
    at_the_edge,
    count_loads,
    poisoned,
    random_x,
    relative_error,
    sections_at_the_edge,
    some_widths,
    work_list,
)
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertShape,
    Scratch,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
)
from vllm_dymoe.kernels.triton.start import run_kernel

BFLOAT16, SILU = torch.bfloat16, Activation.SILU


def make_scratch(floats=1 << 16, held=float("nan")):
    partials = torch.full((floats,), held, device=DEVICE)
    return Scratch(partials, torch.zeros(1 << 10, dtype=torch.int32, device=DEVICE))


def run(x, table, work, tile, activation=SILU, weighting=None, rows=None, scratch=None):
    """Both launches; what gate and up left, and the output."""
    scratch = scratch or make_scratch()
    hidden = poisoned(work.positions, table.shape.intermediate, dtype=x.dtype)
    decode_gate_up(x, hidden, table, work, activation, tile, scratch)
    out = poisoned(rows, table.shape.hidden, dtype=x.dtype)
    decode_down(hidden, out, table, work, tile, scratch, weighting)
    assert not scratch.semaphores.any(), "semaphores are left above zero"
    return hidden, out


def routing(tokens, top_k, experts, seed=0):
    """ids [tokens][top_k], float32 weights, and (token, k) by expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).tolist()
    weights = torch.rand(tokens, top_k, generator=generator)
    chosen = [[(t, k) for t in range(tokens) for k in range(top_k) if ids[t][k] == e] for e in range(experts)]
    return ids, weights.to(DEVICE), chosen


def weighted_reference(experts, ids, weights, x, activation, skipped=()):
    """float64 [tokens, hidden]."""
    want = torch.zeros(x.shape, dtype=torch.float64)
    for t, row in enumerate(ids):
        for k, expert in enumerate(row):
            if (t, k) not in skipped:
                want[t] += float(weights[t, k]) * experts.reference(expert, x[t : t + 1], activation)[0]
    return want


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bits=st.lists(st.sampled_from([16, 8, 4, 2]), min_size=3, max_size=3),
    tokens=st.sampled_from([1, 3]),
    hidden=st.integers(40, 270),
    intermediate=st.integers(40, 100),
    group_size=st.sampled_from([32, 64, 128, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    activation=st.sampled_from(ACTIVATIONS),
    bias=st.booleans(),
    steps=some_widths,
    act_order=some_widths,
    tile=st.builds(DecodeTile, st.sampled_from([4, 8]), st.sampled_from([1, 2, 3])),
    seed=st.integers(0, 1000),
)
def test_the_weighted_sum(
    bits, tokens, hidden, intermediate, group_size, dtype, activation, bias, steps, act_order, tile, seed
):
    """Any tiers in one launch, any number of parts; one expert of each token is left out."""
    shape = ExpertShape(hidden, intermediate, group_size, dtype, bias, steps, act_order, activation.has_gate)
    experts = Experts(shape, bits, seed)
    x = random_x(tokens, hidden, dtype, seed)
    ids, weights, chosen = routing(tokens, 2, 3, seed)
    chosen[0] = []
    skipped = {(t, k) for t in range(tokens) for k in range(2) if ids[t][k] == 0}
    computed = torch.tensor([[int((t, k) not in skipped) for k in range(2)] for t in range(tokens)], dtype=torch.int32)
    weighting = Weighting(weights, computed.to(DEVICE))
    _, out = run(x, experts.table(), work_list(chosen, 2), tile, activation, weighting, tokens)
    want = weighted_reference(experts, ids, weights, x, activation, skipped)
    assert relative_error(out, want) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("steps", "act_order", "bias", "dtype"),
    [({4}, {8, 4}, False, torch.float16), ({8, 2}, {2}, True, BFLOAT16)],
)
def test_what_other_tools_quantized_at_some_bits_and_not_at_others(steps, act_order, bias, dtype):
    """A checkpoint's integers beside a tier derived from them; from slots, and fetched on the way."""
    flags = frozenset(steps), frozenset(act_order)
    experts = Experts(ExpertShape(150, 60, 32, dtype, bias, *flags), [8, 4, 2, 16])
    x, work, tile = random_x(1, 150, dtype), work_list([[(0, e)] for e in range(4)], 4), DecodeTile(4, 2)
    _, out = run(x, experts.table(), work, tile, rows=4)
    for expert in range(4):
        assert relative_error(out[expert], experts.reference(expert, x, SILU)[0]) < TOLERANCE[dtype]
    slots = [torch.zeros_like(blob) for blob in experts.blobs]
    fetched = run(x, experts.table([slot.data_ptr() for slot in slots]), work, tile, rows=4)[1]
    assert torch.equal(fetched, out)
    assert all(torch.equal(slot, blob) for slot, blob in zip(slots, experts.blobs, strict=True))


def test_the_order_of_programs_changes_no_bit():
    """Another program arrives last when the items come in another order."""
    experts = Experts(ExpertShape(130, 64, 32, BFLOAT16), [4, 2, 4])
    x = random_x(2, 130, BFLOAT16)
    _, weights, chosen = routing(2, 3, 3)
    work = work_list(chosen, 3)
    weighting = Weighting(weights, torch.ones(2, 3, dtype=torch.int32, device=DEVICE))
    results = []
    for items in (work.items, work.items.flip(0)):
        turned = WorkList(items.contiguous(), work.rows, work.pairs)
        results.append(run(x, experts.table(), turned, DecodeTile(4, 2), SILU, weighting, 2)[1])
    assert torch.equal(*results)
    assert not results[0].isnan().any()


BIG = 2.0**30


@pytest.mark.parametrize("fetched", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_parts_are_added_in_ascending_order(weighted, fetched):
    """1 + 2^30 - 2^30 is 0 in float32, and 1 in any order that does not begin with the 1 and a large number."""
    experts = Experts(ExpertShape(384, 384, 32, BFLOAT16), [16])
    for packed in experts.matrices[0]:
        packed.weight.fill_(1)
    blob = torch.cat([packed.weight.view(torch.uint8).flatten() for packed in experts.matrices[0]])
    experts.blobs[0][: blob.numel()].copy_(blob)
    x = torch.zeros(1, 384, dtype=BFLOAT16)
    x[0, [0, 128, 256]] = torch.tensor([1, BIG, -BIG], dtype=BFLOAT16)
    work, tile, scratch = work_list([[(0, 0)]], 1), DecodeTile(4, 3), make_scratch()
    slot = torch.zeros_like(experts.blobs[0])
    table = experts.table([slot.data_ptr()] if fetched else None)
    hidden, out = poisoned(1, 384, dtype=BFLOAT16), poisoned(1, 384, dtype=BFLOAT16)
    decode_gate_up(x.to(DEVICE), hidden, table, work, SILU, tile, scratch)
    assert not hidden.any()
    ones = torch.ones(1, 1, device=DEVICE)
    weighting = Weighting(ones, ones.int()) if weighted else None
    decode_down(x.to(DEVICE), out, table, work, tile, scratch, weighting)
    assert not out.any()


def test_experts_are_added_in_ascending_order():
    """The same, by the router's weights: in any other order the first expert's output would remain."""
    experts = Experts(ExpertShape(64, 64, 32, BFLOAT16), [4])
    work = work_list([[(0, 0), (0, 1), (0, 2)]], 3, step=1)
    weighting = Weighting(
        torch.tensor([[1, BIG, -BIG]], device=DEVICE), torch.ones(1, 3, dtype=torch.int32, device=DEVICE)
    )
    _, out = run(random_x(1, 64, BFLOAT16), experts.table(), work, DecodeTile(4, 1), SILU, weighting, 1)
    assert not out.any()


def test_nothing_is_summed_before_the_last_expert_has_come():
    """A sum taken too early writes something: what is not there yet is not NaN, unlike the output."""
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
    """The same for parts of the columns: of three programs the last one is not started."""
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


ORDERED = frozenset((8, 2))


@pytest.mark.skipif(DEVICE != "cpu", reason="compute-sanitizer looks for the same on a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tile", "weighted"), [(DecodeTile(4, 2), False), (DecodeTile(4, 1), True)])
def test_nothing_beside_the_tensors_is_touched(dtype, tile, weighted):
    """Sizes off every tile, an odd number of tokens, and memory that ends behind each tensor and section."""
    experts, copies = Experts(ExpertShape(100, 70, 32, dtype, True, act_order=ORDERED), [16, 8, 4, 2]), []
    table = sections_at_the_edge(experts, copies)
    x, work = at_the_edge(random_x(3, 100, dtype)), work_list([[(t, e) for t in range(3)] for e in range(4)], 4)
    work = WorkList(*(at_the_edge(part) for part in (work.items, work.rows, work.pairs)))
    # 2 tiles of 64 rows, for each of 12 positions and each part; gate and up have a sum each.
    scratch = Scratch(at_the_edge(torch.full((12 * 512,), torch.nan)), at_the_edge(torch.zeros(24, dtype=torch.int32)))
    hidden = at_the_edge(poisoned(12, 70, dtype=dtype))
    decode_gate_up(x, hidden, table, work, SILU, tile, scratch)
    weighting = None
    if weighted:
        weighting = Weighting(at_the_edge(torch.ones(3, 4)), at_the_edge(torch.ones(3, 4, dtype=torch.int32)))
    out = at_the_edge(poisoned(3 if weighted else 12, 100, dtype=dtype))
    decode_down(hidden, out, table, work, tile, scratch, weighting)
    assert not out.isnan().any()


def test_where_the_bytes_lie_changes_no_bit():
    shape = ExpertShape(128, 64, 32, BFLOAT16, True)
    experts = Experts(shape, [4, 2])
    x = random_x(1, 128, BFLOAT16)
    work = work_list([[(0, 0)], [(0, 1)]], 2)
    want = run(x, experts.table(), work, DecodeTile(4, 1), rows=2)[1]
    arena = torch.full((1 << 17,), 0xEE, dtype=torch.uint8, device=DEVICE)
    for offset in (16, 4096 + 48):
        places = [arena[offset + (i << 15) :][: blob.numel()].copy_(blob) for i, blob in enumerate(experts.blobs)]
        table = table_of_blobs(shape, [place.data_ptr() for place in places], [4, 2], DEVICE)
        assert torch.equal(run(x, table, work, DecodeTile(4, 1), rows=2)[1], want)


@pytest.mark.parametrize(
    ("hidden", "intermediate", "group_size", "tokens", "bias", "tile"),
    [(300, 70, 32, 1, False, DecodeTile(4, 3)), (65, 64, 128, 3, True, DecodeTile(4, 1))],
)
def test_what_is_fetched_is_the_source_and_changes_no_bit(hidden, intermediate, group_size, tokens, bias, tile):
    """Every byte of the blob arrives, padding included, none beside it, and the output is that of the slot."""
    bits = [16, 8, 4, 2, 4]
    experts = Experts(ExpertShape(hidden, intermediate, group_size, BFLOAT16, bias), bits)
    x = random_x(tokens, hidden, BFLOAT16)
    chosen = [[(t, e) for t in range(tokens)] for e in range(len(bits))]
    slots = [torch.full((blob.numel() + 32,), 0xEE, dtype=torch.uint8, device=DEVICE) for blob in experts.blobs]
    # The last one is on the device already.
    targets = [slot.data_ptr() + 16 for slot in slots[:-1]] + [0]
    assert all(address % 16 == 0 for address in targets)
    whole = work_list(chosen, len(bits), step=tokens)
    hidden_states, out = run(x, experts.table(targets), whole, tile, rows=tokens * len(bits))
    for slot, blob in zip(slots[:-1], experts.blobs, strict=False):
        assert torch.equal(slot[16:-16], blob)
        assert bool((slot[:16] == 0xEE).all())
        assert bool((slot[-16:] == 0xEE).all())
    assert bool((slots[-1] == 0xEE).all())
    starts = [slot.data_ptr() + 16 for slot in slots[:-1]] + [experts.blobs[-1].data_ptr()]
    again = table_of_blobs(experts.shape, starts, bits, DEVICE)
    slot_states, slot_out = run(x, again, whole, tile, rows=tokens * len(bits))
    assert torch.equal(hidden_states, slot_states)
    assert torch.equal(out, slot_out)
    for expert in range(len(bits)):
        want = experts.reference(expert, x, SILU)
        assert relative_error(out.view(tokens, len(bits), -1)[:, expert], want) < TOLERANCE[BFLOAT16]


@pytest.mark.skipif(DEVICE != "cpu", reason="counts what the interpreter loads")
@pytest.mark.parametrize("bits", [16, 8, 4, 2])
def test_each_byte_is_read_once(bits, monkeypatch):
    """Over the link: what is fetched is computed from the copy. And weights from memory, whatever their token.

    Only an order of columns, here at 8 and 2 bits, is fetched by each block of 64 rows, of which there are two.
    """
    experts = Experts(ExpertShape(100, 70, 32, BFLOAT16, True, act_order=ORDERED), [bits])
    x, work = random_x(2, 100, BFLOAT16), work_list([[(0, 0), (1, 0)]], 1)
    slot = torch.zeros_like(experts.blobs[0])
    counts = count_loads(monkeypatch, experts.blobs[0])
    run(x, experts.table([slot.data_ptr()]), work, DecodeTile(4, 2), rows=2)
    for fmt, offset in zip(experts.shape.formats(bits), section_offsets(experts.shape, bits), strict=True):
        assert (counts[offset : offset + fmt.order_offset] == 1).all()
        assert (counts[offset + fmt.order_offset : offset + fmt.nbytes] == 2).all()
    counts[:] = 0
    run(x, experts.table(), work, DecodeTile(4, 2), rows=2)
    for fmt, offset in zip(experts.shape.formats(bits), section_offsets(experts.shape, bits), strict=True):
        assert (counts[offset : offset + fmt.weight_bytes] == 1).all()


def test_bytes_that_no_row_reads_arrive_too():
    """Random bytes as a blob: whatever lies in padding is copied like everything else."""
    for bits in (16, 8, 4, 2):
        shape = ExpertShape(70, 67, 32, BFLOAT16, True)
        experts = Experts(shape, [bits])
        experts.blobs[0].random_(0, 60)  # no infinities among the scales
        slot = torch.zeros_like(experts.blobs[0])
        run(
            random_x(1, 70, BFLOAT16),
            experts.table([slot.data_ptr()]),
            work_list([[(0, 0)]], 1),
            DecodeTile(4, 1),
            rows=1,
        )
        assert torch.equal(slot, experts.blobs[0])


def test_empty_items_are_nothing():
    """A list made on the device has room for more items than there are."""
    experts = Experts(ExpertShape(64, 64, 32, BFLOAT16), [4])
    x = random_x(1, 64, BFLOAT16)
    work = work_list([[(0, 0)]], 1)
    want = run(x, experts.table(), work, DecodeTile(4, 1), rows=1)[1]
    items = torch.cat([work.items, torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)])
    assert torch.equal(
        run(x, experts.table(), WorkList(items, work.rows, work.pairs), DecodeTile(4, 1), rows=1)[1], want
    )


def never(*arguments):
    raise AssertionError("launched")


SHAPE = ExpertShape(64, 64, 32, BFLOAT16)


def test_a_limit_of_registers_reaches_the_compiler():
    """But for programs of 8 warps, of which only one would fit."""
    experts, work = Experts(SHAPE, [4]), work_list([[(0, 0)]], 1)
    x, slot, started = random_x(1, 64, BFLOAT16), torch.zeros_like(experts.blobs[0]), []

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
        (127, 1, "partials has 127 elements, expected at least 128"),
        (128, 0, "semaphores has 0 elements, expected at least 1"),
    ],
)
def test_too_little_scratch_of_down_is_named(weighted, partials, semaphores, sentence):
    """64 rows in two parts, or of two experts."""
    ones = torch.ones(1, 2, device=DEVICE)
    weighting, tile = (Weighting(ones, ones.int()), DecodeTile(4, 1)) if weighted else (None, DecodeTile(4, 2))
    scratch = Scratch(torch.zeros(partials, device=DEVICE), torch.zeros(semaphores, dtype=torch.int32, device=DEVICE))
    x = torch.zeros(1, 64, dtype=BFLOAT16, device=DEVICE)
    table, work = Experts(SHAPE, [4]).table(), work_list([[(0, 0)]], 1)
    with pytest.raises(ValueError, match=sentence):
        decode_down(x, x, table, work, tile, scratch, weighting, start=never)
