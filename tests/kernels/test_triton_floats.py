"""Published floats in the launches: decode, grouped, fetched through, beside a tier of steps."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels.sections import (
    DEVICE,
    TOLERANCE,
    Experts,
    poisoned,
    random_x,
    relative_error,
    run_backwards,
    work_list,
)
from tests.kernels.test_triton_decode import run
from vllm_dymoe.kernels import Activation, dequantize
from vllm_dymoe.kernels.triton import DecodeTile, ExpertShape, GroupedTile, grouped_down, grouped_gate_up
from vllm_dymoe.residency.code import CODEBOOKS, FP8, MXFP4, NVFP4

TAGS = [book.tag for book in CODEBOOKS.values()]
kinds = st.lists(st.sampled_from([*TAGS, 2]), min_size=1, max_size=3)
sizes = st.integers(20, 200)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=kinds,
    tokens=st.sampled_from([1, 2, 5]),
    hidden=sizes,
    intermediate=sizes,
    group_size=st.sampled_from([32, 128]),
    bias=st.booleans(),
    split=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_decode_agrees_with_the_reference(kinds, tokens, hidden, intermediate, group_size, bias, split, dtype):
    experts = Experts(ExpertShape(hidden, intermediate, group_size, dtype, bias), kinds)
    x = random_x(tokens, hidden, dtype)
    count = len(kinds)
    chosen = [[(t, e) for t in range(tokens)] for e in range(count)]
    _, out = run(x, experts.table(), work_list(chosen, count), DecodeTile(4, split), rows=tokens * count)
    for expert in range(count):
        got = out.view(tokens, count, hidden)[:, expert]
        assert relative_error(got, experts.reference(expert, x, Activation.SILU)) < TOLERANCE[dtype], kinds[expert]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kinds=kinds,
    hidden=sizes,
    intermediate=sizes,
    group_size=st.sampled_from([32, 128]),
    bias=st.booleans(),
    block_n=st.sampled_from([64, 128]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_grouped_agrees_with_the_reference(kinds, hidden, intermediate, group_size, bias, block_n, dtype):
    experts = Experts(ExpertShape(hidden, intermediate, group_size, dtype, bias), kinds)
    x = random_x(20, hidden, dtype)
    count = len(kinds)
    tile = GroupedTile(16, block_n, 64, 4, 2)
    work = work_list([[(t, e) for t in range(20)] for e in range(count)], count, tile.block_m)
    inner = poisoned(work.positions, intermediate, dtype=dtype)
    grouped_gate_up(x, inner, experts.table(), work, Activation.SWIGLU_OAI, tile)
    out = poisoned(20 * count, hidden, dtype=dtype)
    grouped_down(inner, out, experts.table(), work, tile)
    for expert in range(count):
        got = out.view(20, count, hidden)[:, expert]
        want = experts.reference(expert, x, Activation.SWIGLU_OAI)
        assert relative_error(got, want) < TOLERANCE[dtype], kinds[expert]


@pytest.mark.parametrize(
    ("book", "hidden", "group_size", "bias"),
    [
        (MXFP4, 200, 32, False),
        (MXFP4, 200, 32, True),
        (NVFP4, 200, 32, False),
        (NVFP4, 200, 32, True),
        (FP8, 200, 32, True),
        # The first part has 384 of 768 columns, one group and a half.
        (FP8, 520, 256, False),
    ],
    ids=lambda value: getattr(value, "name", None),
)
@pytest.mark.parametrize("backwards", [False, True])
def test_what_is_fetched_is_the_source_and_changes_no_bit(monkeypatch, book, hidden, group_size, bias, backwards):
    """Also where programs run in the other order: none reads what only another one has fetched."""
    experts = Experts(ExpertShape(hidden, 70, group_size, torch.bfloat16, bias), [book.tag])
    x = random_x(2, hidden, torch.bfloat16)
    work = work_list([[(0, 0), (1, 0)]], 1)
    tile = DecodeTile(4, 2)
    want = run(x, experts.table(), work, tile, rows=2)
    slot = torch.full_like(experts.blobs[0], 0xEE)
    if backwards:
        run_backwards(monkeypatch)
    got = run(x, experts.table([slot.data_ptr()]), work, tile, rows=2)
    assert torch.equal(slot, experts.blobs[0])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("book", [MXFP4, NVFP4, FP8], ids=lambda book: book.name)
def test_every_code_is_its_level(book):
    """A matrix that holds each code in each place of a word, times unit vectors: no sum hides a wrong one."""
    shape = ExpertShape(64, 256, 32, torch.bfloat16)
    experts = Experts(shape, [book.tag])
    down = experts.matrices[0][2]
    x = torch.eye(256).bfloat16().to(DEVICE)
    work = work_list([[(t, 0) for t in range(256)]], 1, 16)
    out = poisoned(256, 64, dtype=torch.bfloat16)
    grouped_down(x, out, experts.table(), work, GroupedTile(16, 64, 64, 4, 2))
    # MXFP4's weights are bfloat16 numbers. The others are rounded, and the interpreter may take the other neighbour.
    tolerance = 0 if book is MXFP4 else 2**-7
    assert torch.allclose(out.t().cpu(), dequantize(down, torch.bfloat16), rtol=tolerance, atol=0)
