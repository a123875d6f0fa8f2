"""Codes in two sections: upper halves, or both, for each expert of a launch."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.experts import table_of_blobs
from tests.kernels.matrices import in_one_section
from tests.kernels.sections import (
    DEVICE,
    TOLERANCE,
    Experts,
    at_the_edge,
    poisoned,
    random_x,
    relative_error,
    sections_at_the_edge,
    work_list,
)
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import (
    DecodeTile,
    ExpertShape,
    GroupedTile,
    Scratch,
    decode_down,
    decode_gate_up,
    grouped_down,
    grouped_gate_up,
)
from vllm_dymoe.kernels.triton.kernel import TritonKernel
from vllm_dymoe.residency.decision import Decision, Grouped
from vllm_dymoe.residency.format import Expert

SILU, BFLOAT16 = Activation.SILU, torch.bfloat16
TILE = DecodeTile(4, 2)
SHAPES = [
    (ExpertShape(150, 60, 32, BFLOAT16, nested=4), [4, 2, 16]),
    (ExpertShape(130, 70, 64, torch.float16, True, frozenset({4, 2}), frozenset({4, 2}), nested=4), [2, 4, 4]),
    (ExpertShape(270, 64, 128, BFLOAT16, nested=4), [4, 2]),
    (ExpertShape(150, 60, 64, BFLOAT16, True, frozenset(), frozenset({8, 4}), nested=8), [8, 4, 8]),
]


def decode(x, table, work, rows):
    scratch = Scratch(poisoned(1 << 16, dtype=torch.float32), torch.zeros(1 << 10, dtype=torch.int32, device=DEVICE))
    hidden = poisoned(work.positions, table.shape.intermediate, dtype=x.dtype)
    decode_gate_up(x, hidden, table, work, SILU, TILE, scratch)
    out = poisoned(rows, table.shape.hidden, dtype=x.dtype)
    decode_down(hidden, out, table, work, TILE, scratch)
    return out


def group(x, table, work, rows):
    tile = GroupedTile(16, 64, 32, 4, 2)
    hidden = poisoned(work.positions, table.shape.intermediate, dtype=x.dtype)
    grouped_gate_up(x, hidden, table, work, SILU, tile)
    out = poisoned(rows, table.shape.hidden, dtype=x.dtype)
    grouped_down(hidden, out, table, work, tile)
    return out


def in_single_sections(experts):
    """The whole codes of nested experts, as one section each."""
    whole = object.__new__(Experts)
    whole.shape, whole.bits, whole.matrices, whole.blobs, whole.fine = replace(experts.shape, nested=0), [], [], [], []
    for width, three in zip(experts.bits, experts.matrices, strict=True):
        if width == experts.shape.nested:
            three = list(map(in_one_section, three))
            sections = [torch.tensor([], dtype=torch.uint8).set_(part.weight.untyped_storage()) for part in three]
            whole.bits.append(width)
            whole.matrices.append(three)
            whole.blobs.append(torch.cat(sections).to(DEVICE))
    return whole


@pytest.mark.parametrize("compute", [decode, group])
@pytest.mark.parametrize(("shape", "bits"), SHAPES)
def test_any_mix_agrees_with_the_reference_and_whole_codes_keep_their_bits(shape, bits, compute):
    experts, count = Experts(shape, bits), len(bits)
    x = random_x(3, shape.hidden, shape.dtype)
    tokens = [[(t, e) for t in range(3) if t != e] for e in range(count)]
    out = compute(x, experts.table(), work_list(tokens, count), 3 * count).view(3, count, -1)
    nested = [e for e in range(count) if bits[e] == shape.nested]
    for e in range(count):
        rows = [t for t, _ in tokens[e]]
        assert relative_error(out[rows, e], experts.reference(e, x[rows], SILU)) < TOLERANCE[shape.dtype], bits[e]
    single = in_single_sections(experts)
    alike = work_list([tokens[e] for e in nested], count)
    same = compute(x, single.table(), alike, 3 * count).view(3, count, -1)
    for e in nested:
        rows = [t for t, _ in tokens[e]]
        assert torch.equal(out[rows, e], same[rows, e])


@pytest.mark.parametrize(("shape", "bits"), [SHAPES[0], (replace(SHAPES[1][0], hidden=70), [2, 4]), *SHAPES[2:]])
def test_either_section_is_fetched_by_itself_or_both(shape, bits):
    """An expert comes whole, is promoted where its base is, is lowered where nothing is, or is there."""
    experts, count = Experts(shape, bits), len(bits)
    x, work = random_x(1, shape.hidden, shape.dtype), work_list([[(0, e)] for e in range(count)], count)
    want = decode(x, experts.table(), work, count)
    for base, fine in ((True, True), (False, True), (True, False), (False, False)):
        slots = [torch.zeros_like(blob) for blob in experts.blobs]
        fine_slots = [torch.zeros_like(blob) for blob in experts.fine]
        table = experts.table(
            [slot.data_ptr() if base else 0 for slot in slots],
            [slot.data_ptr() if fine and slot.numel() else 0 for slot in fine_slots],
        )
        assert torch.equal(decode(x, table, work, count), want)
        for stored, there in ((slots, base), (fine_slots, fine)):
            source = experts.blobs if stored is slots else experts.fine
            for slot, blob in zip(stored, source, strict=True):
                assert torch.equal(slot, blob if there else torch.zeros_like(blob))


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter's loads are the process's own")
@pytest.mark.parametrize("compute", [decode, group])
@pytest.mark.parametrize(("shape", "bits"), [SHAPES[1], SHAPES[3]])
def test_nothing_is_read_behind_a_section(shape, bits, compute):
    experts, copies, count = Experts(shape, bits), [], len(bits)
    table = sections_at_the_edge(experts, copies)
    work = work_list([[(0, e)] for e in range(count)], count)
    out = compute(at_the_edge(random_x(1, shape.hidden, shape.dtype)), table, work, count)
    assert not out.isnan().any()


def test_a_layer_of_both_through_the_kernel():
    """Placed as its slices come: the same as each expert by itself."""
    shape, bits = SHAPES[0]
    experts = Experts(shape, bits)
    kernel = TritonKernel(DEVICE, formats=[shape.formats(width)[0] for width in bits])
    x, tokens = random_x(2, shape.hidden, shape.dtype), torch.tensor([0, 1])
    pairs = torch.cat([tokens * 3 + e for e in range(3)])
    decision = Decision.of_routing(Grouped([0, 1, 2], [0, 2, 4, 6], tokens.repeat(3), pairs), [0, 1, 2])
    out = poisoned(6, shape.hidden, dtype=shape.dtype)
    kernel.begin(x, decision, out, SILU)
    for order in ([1, 0], [2]):
        for e in order:
            decision.place(e, Expert(*experts.matrices[e]))
        kernel.compute(order)
    for e in range(3):
        assert relative_error(out.view(2, 3, -1)[:, e], experts.reference(e, x, SILU)) < TOLERANCE[shape.dtype]


def test_whole_codes_and_halves_of_the_same_bits_cannot_share_a_launch():
    nested, whole = ExpertShape(64, 64, 32, BFLOAT16, nested=4), ExpertShape(64, 64, 32, BFLOAT16)
    with pytest.raises(ValueError, match="halves"):
        ExpertShape.of([nested.formats(4), whole.formats(2)])
    with pytest.raises(ValueError, match="fine is missing"):
        table_of_blobs(nested, [0x1000], [4], DEVICE)
    with pytest.raises(ValueError, match="go together"):
        table_of_blobs(nested, [0x1000], [4], DEVICE, [0x2000], [0x3000])
