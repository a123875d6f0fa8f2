"""Which bytes the launches read and write: sections, codes in two of them, slots that are filled on the way."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.experts import section_of, section_offsets, table_of_blobs
from tests.kernels.matrices import in_one_section
from tests.kernels.sections import (
    DEVICE,
    TOLERANCE,
    Experts,
    at_the_edge,
    count_loads,
    decode,
    grouped,
    poisoned,
    random_x,
    relative_error,
    run_backwards,
    sections_at_the_edge,
    work_list,
)
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertShape,
    GroupedTile,
    Scratch,
    Weighting,
    WorkList,
    decode_down,
    decode_gate_up,
)
from vllm_dymoe.residency.code import CODEBOOKS, FP8

BFLOAT16, SILU = torch.bfloat16, Activation.SILU
FLOATS = [book.tag for book in CODEBOOKS.values()]
ORDERED = frozenset((8, 2))
WAYS = [DecodeTile(4, 2), DecodeTile(4, 1), GroupedTile(16, 64, 32, 4, 2), GroupedTile(32, 256, 16, 4, 2)]
HALVES = [
    (ExpertShape(150, 60, 32, BFLOAT16, nested=4), [4, 2, 16]),
    (ExpertShape(130, 70, 64, torch.float16, True, frozenset({4, 2}), frozenset({4, 2}), nested=4), [2, 4, 4]),
    (ExpertShape(270, 64, 128, BFLOAT16, nested=4), [4, 2]),
    (ExpertShape(150, 60, 64, BFLOAT16, True, frozenset(), frozenset({8, 4}), nested=8), [8, 4, 8]),
]


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
    """Sizes off every tile, an odd number of tokens, and memory that ends behind each tensor and section."""
    experts, copies, count = Experts(shape, bits), [], len(bits)
    table, x = sections_at_the_edge(experts, copies), at_the_edge(random_x(3, shape.hidden, shape.dtype))
    work = work_list([[(t, e) for t in range(3)] for e in range(count)], count, getattr(way, "block_m", 2))
    work = WorkList(*(at_the_edge(part) for part in (work.items, work.rows, work.pairs)))
    if isinstance(way, GroupedTile):
        _, out = grouped(x, table, work, 3 * count, way, place=at_the_edge)
        assert not out.isnan().any()
        return
    # Tiles of 64 rows, for each position and each part; gate and up have a sum each.
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
    """Every byte of the blob arrives, padding included, none beside it, and the output is that of the slot.

    Also where programs run in the other order: none reads what only another one has fetched.
    """
    experts = Experts(ExpertShape(hidden, intermediate, group_size, BFLOAT16, bias), bits)
    x = random_x(tokens, hidden, BFLOAT16)
    chosen = [[(t, e) for t in range(tokens)] for e in range(len(bits))]
    slots = [torch.full((blob.numel() + 32,), 0xEE, dtype=torch.uint8, device=DEVICE) for blob in experts.blobs]
    # The last one is on the device already.
    targets = [slot.data_ptr() + 16 for slot in slots[:-1]] + [0]
    assert all(address % 16 == 0 for address in targets)
    whole = work_list(chosen, len(bits), step=tokens)
    if backwards:
        run_backwards(monkeypatch)
    hidden_states, out = decode(x, experts.table(targets), whole, tokens * len(bits), tile)
    monkeypatch.undo()
    for slot, blob in zip(slots[:-1], experts.blobs, strict=False):
        assert torch.equal(slot[16:-16], blob)
        assert bool((slot[:16] == 0xEE).all())
        assert bool((slot[-16:] == 0xEE).all())
    assert bool((slots[-1] == 0xEE).all())
    starts = [slot.data_ptr() + 16 for slot in slots[:-1]] + [experts.blobs[-1].data_ptr()]
    again = table_of_blobs(experts.shape, starts, bits, DEVICE)
    slot_states, slot_out = decode(x, again, whole, tokens * len(bits), tile)
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
    decode(x, experts.table([slot.data_ptr()]), work, 2)
    for fmt, offset in zip(experts.shape.formats(bits), section_offsets(experts.shape, bits), strict=True):
        assert (counts[offset : offset + fmt.order_offset] == 1).all()
        assert (counts[offset + fmt.order_offset : offset + fmt.nbytes] == 2).all()
    counts[:] = 0
    decode(x, experts.table(), work, 2)
    for fmt, offset in zip(experts.shape.formats(bits), section_offsets(experts.shape, bits), strict=True):
        assert (counts[offset : offset + fmt.weight_bytes] == 1).all()


def test_empty_items_are_nothing():
    """A list made on the device has room for more items than there are."""
    experts = Experts(ExpertShape(64, 64, 32, BFLOAT16), [4])
    x = random_x(1, 64, BFLOAT16)
    work = work_list([[(0, 0)]], 1)
    want = decode(x, experts.table(), work, 1)[1]
    items = torch.cat([work.items, torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)])
    assert torch.equal(decode(x, experts.table(), WorkList(items, work.rows, work.pairs), 1)[1], want)


def in_single_sections(experts):
    whole = object.__new__(Experts)
    whole.shape, whole.bits, whole.matrices, whole.blobs, whole.fine = replace(experts.shape, nested=0), [], [], [], []
    for width, three in zip(experts.bits, experts.matrices, strict=True):
        if width == experts.shape.nested:
            three = list(map(in_one_section, three))
            whole.bits.append(width)
            whole.matrices.append(three)
            whole.blobs.append(torch.cat(list(map(section_of, three))).to(DEVICE))
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
    """An expert comes whole, is promoted where its base is, is lowered where nothing is, or is there."""
    experts, count = Experts(shape, bits), len(bits)
    x, work = random_x(1, shape.hidden, shape.dtype), work_list([[(0, e)] for e in range(count)], count)
    want = decode(x, experts.table(), work, count)[1]
    for base, fine in ((True, True), (False, True), (True, False), (False, False)):
        slots = [torch.zeros_like(blob) for blob in experts.blobs]
        fine_slots = [torch.zeros_like(blob) for blob in experts.fine]
        table = experts.table(
            [slot.data_ptr() if base else 0 for slot in slots],
            [slot.data_ptr() if fine and slot.numel() else 0 for slot in fine_slots],
        )
        assert torch.equal(decode(x, table, work, count)[1], want)
        for stored, there in ((slots, base), (fine_slots, fine)):
            source = experts.blobs if stored is slots else experts.fine
            for slot, blob in zip(stored, source, strict=True):
                assert torch.equal(slot, blob if there else torch.zeros_like(blob))


def test_whole_codes_and_halves_of_the_same_bits_cannot_share_a_launch():
    nested, whole = ExpertShape(64, 64, 32, BFLOAT16, nested=4), ExpertShape(64, 64, 32, BFLOAT16)
    with pytest.raises(ValueError, match="halves"):
        ExpertShape.of([nested.formats(4), whole.formats(2)])
    with pytest.raises(ValueError, match="fine is missing"):
        table_of_blobs(nested, [0x1000], [4], DEVICE)
    with pytest.raises(ValueError, match="go together"):
        table_of_blobs(nested, [0x1000], [4], DEVICE, [0x2000], [0x3000])
