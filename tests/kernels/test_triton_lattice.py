"""Lattice codes: rotations and products match their plain twins.

Experts are resident or fetched, and batches small or large.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.matrices import MIXED, random_expert
from tests.kernels.sections import (
    DEVICE,
    TOLERANCE,
    Experts,
    at_the_edge,
    decode,
    grouped,
    poisoned,
    random_x,
    relative_error,
    work_list,
)
from vllm_dymoe.experts.encoding import E8, E8_NESTED
from vllm_dymoe.kernels.lattice import rotate
from vllm_dymoe.kernels.triton import DecodeTile, ExpertShape, GroupedTile
from vllm_dymoe.kernels.triton.rotate import rotate_inputs, rotated_inputs

BOTH, ALONE = [E8_NESTED.tag, E8.tag], [E8.tag]


@settings(max_examples=25, deadline=None)
@given(
    odd=st.integers(1, 45).map(lambda n: 2 * n - 1),
    power=st.integers(0, 12),
    tokens=st.sampled_from([0, 1, 3]),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 1000),
)
def test_rotations_are_those_of_the_plain_twin(odd, power, tokens, dtype, seed):
    """Blocks have the largest power of two that divides the width.

    No byte outside of the rows is touched.
    """
    columns = min(odd, 1 << 13 >> power) << power
    block = columns & -columns
    x = random_x(tokens, columns, dtype, seed)
    place = at_the_edge if DEVICE == "cpu" else torch.clone
    into = place(poisoned(tokens, columns, dtype=dtype))
    rotate_inputs(place(x), into, block)
    want = rotate(x.cpu().float(), block)
    if dtype is torch.float16:  # the interpreter does not round to bfloat16 as a GPU does
        assert torch.equal(into.cpu(), want.half())
    else:
        torch.testing.assert_close(into.cpu().float(), want, rtol=2**-7, atol=0)


def test_blocks_that_do_not_divide_are_refused():
    x = torch.zeros(1, 96)
    for block in (64, 3):
        with pytest.raises(ValueError, match=f"block is {block}"):
            rotate_inputs(x, x, block)


@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    **MIXED | {"group_size": st.just(64), "hidden": st.integers(60, 200)},
    bits=st.sampled_from([BOTH, ALONE]),
    tokens=st.sampled_from([1, 2, 3]),
    tile=st.builds(DecodeTile, st.sampled_from([4, 8]), st.sampled_from([1, 2, 3])),
    wide=st.builds(
        GroupedTile, st.sampled_from([16, 32]), st.sampled_from([64, 128]), st.sampled_from([16, 32, 64]), st.just(4),
        st.just(2),
    ),
)  # fmt: skip
def test_any_way_agrees_with_the_reference(bits, tokens, activation, tile, wide, seed, **sizes):
    """Resident experts and experts fetched into slots give the same bits.

    An expert's tokens are one item.
    """
    shape = ExpertShape(**sizes, has_gate=activation.has_gate, nested=4 if bits is BOTH else 0)
    experts, count, dtype = Experts(shape, bits, seed), len(bits), shape.dtype
    x = random_x(tokens, shape.hidden, dtype, seed)
    rotated = rotated_inputs(x, shape.rotation(frozenset(bits)))
    chosen = [[(t, e) for t in range(tokens)] for e in range(count)]
    _, out = decode(rotated, experts.table(), work_list(chosen, count), tokens * count, tile, activation)
    slots, residual = ([torch.zeros_like(packed) for packed in slices] for slices in (experts.slices, experts.residual))
    places = [[slot.data_ptr() if slot.numel() else 0 for slot in some] for some in (slots, residual)]
    table = experts.table(places[0], places[1] if shape.nested else None)
    _, fetched = decode(rotated, table, work_list(chosen, count, tokens), tokens * count, tile, activation)
    assert torch.equal(fetched, out)
    assert all(torch.equal(*pair) for pair in zip(slots + residual, experts.slices + experts.residual, strict=True))
    work = work_list(chosen, count, wide.block_m)
    _, many = grouped(rotated, experts.table(), work, tokens * count, wide, activation)
    for expert in range(count):
        want = experts.reference(expert, x, activation)
        for got in (out, many):
            got = got.view(tokens, count, -1)[:, expert]
            assert relative_error(got, want) < TOLERANCE[dtype], (bits[expert], got is many)


def test_rotated_inputs_are_of_no_use_to_other_codes():
    lattice, integers = (random_expert(96, 80, encoding, 64).formats for encoding in (E8_NESTED, 4))
    with pytest.raises(ValueError, match="lattice codes"):
        ExpertShape.of([lattice, integers])
