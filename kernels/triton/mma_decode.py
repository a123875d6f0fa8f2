"""Decode on tensor cores, in Gluon.

These are the launches of ``decode.py`` for up to 16 tokens of an expert at a time. Arguments, grids, work lists and
scratch are those of ``decode.py``, whose kernels are the plain twins of these; what differs is described in
``mma_rows.py``. An item has any number of positions. A card that runs these passes a self-test first
(``server/self_test.py``).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_dymoe.kernels.triton import activation as of_activation
from vllm_dymoe.kernels.triton import decode, fetch
from vllm_dymoe.kernels.triton.in_gluon import barrier, in_gluon
from vllm_dymoe.kernels.triton.mma_codes import only, spread_layout
from vllm_dymoe.kernels.triton.mma_rows import mma_products
from vllm_dymoe.kernels.triton.section import DESCRIPTIONS, down_rotation
from vllm_dymoe.kernels.triton.start import Overlap

_AT_START, _WHOLE = gl.constexpr(int(Overlap.START)), gl.constexpr(int(Overlap.WHOLE))
_add_experts, _arrives_last = in_gluon(decode.add_experts), in_gluon(decode.arrives_last)
_fetch_two, _lower, _write_zeros = in_gluon(decode._fetch_two), in_gluon(decode._lower), in_gluon(decode._write_zeros)
_fetch_share, _fetch_residual = in_gluon(fetch.fetch_share), in_gluon(fetch.fetch_residual)
_gated = in_gluon(of_activation.gated)


@gluon.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def mma_gate_up_kernel(
    x,
    hidden,
    addresses,
    destinations,
    residual,
    residual_destinations,
    bits,
    items,
    rows,
    partials,
    semaphores,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    PRECISIONS: gl.constexpr,
    NESTED: gl.constexpr,
    STEPS: gl.constexpr,
    ORDERED: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SPLIT: gl.constexpr,
    FETCH: gl.constexpr,
    WARPS: gl.constexpr,
    MOST: gl.constexpr,
    DEPENDENT: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """Compute hidden states: activation(gate x[row]) * up x[row].

    The result goes to hidden[position]; see decode.gate_up_kernel. MOST is 16 if an item may have more than eight
    positions, else 8. OVERLAP: see start.Overlap. DEPENDENT: the next launch, down, may begin as soon as all programs
    of this one have got here. It reads the plan before it waits, so with an overlap at the start programs first wait
    for the planner.
    """
    if OVERLAP == _AT_START:
        gdc_wait()
    if DEPENDENT:
        gdc_launch_dependents()
    item = gl.program_id(1)
    expert = gl.load(items + 3 * item)
    first = gl.load(items + 3 * item + 1)
    last = gl.load(items + 3 * item + 2)
    source = addresses + 3 * expert
    lower = residual + 3 * expert
    if FETCH:
        if last > first:
            source, lower = _fetch_two(
                source, destinations + 3 * expert, lower, residual_destinations + 3 * expert, bits + 3 * expert,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, ORDERED, BIAS, 0 if ACTIVATION[4] else 1, SPLIT, WARPS,
            )  # fmt: skip
    if MOST > 8 and last - first > 8:
        for at in range(first, last, 16):
            _gate_up(
                x, hidden, source, lower, bits + 3 * expert, rows, partials, semaphores, at, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, ACTIVATION, 16, SPLIT, WARPS,
            )  # fmt: skip
    elif last > first:
        _gate_up(
            x, hidden, source, lower, bits + 3 * expert, rows, partials, semaphores, first, last,
            ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, ACTIVATION, 8, SPLIT, WARPS,
        )  # fmt: skip
    if OVERLAP == _WHOLE:  # also in programs without positions
        gdc_wait()


@gluon.jit
def _gate_up(
    x, hidden, source, lower, bits, rows, partials, semaphores, first, last,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, PRECISIONS: gl.constexpr, NESTED: gl.constexpr,
    STEPS: gl.constexpr, ORDERED: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, TOKENS: gl.constexpr,
    SPLIT: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Compute up to TOKENS positions from `first` on."""
    FLOAT16: gl.constexpr = x.dtype.element_ty == gl.float16
    block = gl.program_id(0)
    split = gl.program_id(2)
    count = gl.minimum(last - first, TOKENS)
    LAYOUT: gl.constexpr = spread_layout(WARPS)
    gate = gl.zeros([TOKENS, 64], gl.float32, layout=LAYOUT)
    up = gl.zeros([TOKENS, 64], gl.float32, layout=LAYOUT)
    for number in range(0 if ACTIVATION[4] else 1, 2):  # a loop, for the products to be compiled once
        gate = up
        up = mma_products(
            gl.load(source + number), _lower(lower + number, NESTED), gl.load(bits + number),
            block, x, rows, first, count, split,
            ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, True, TOKENS, SPLIT, WARPS, FLOAT16, False,
        )  # fmt: skip
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))[:, None]
    position = first + token
    row = block * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (token < count) & (row < ROWS)
    hidden_at = hidden + position.to(gl.int64) * ROWS + row
    if SPLIT == 1:
        inner = _down_inputs(gate, up, block * 64, ROWS, PRECISIONS, ACTIVATION, TOKENS, WARPS)
        gl.store(hidden_at, inner.to(hidden.dtype.element_ty), mask=inside)
    else:
        BLOCKS: gl.constexpr = (ROWS + 63) // 64
        PADDED: gl.constexpr = BLOCKS * 64
        partials_at = partials + position.to(gl.int64) * (SPLIT * 2 * PADDED) + row
        gl.store(partials_at + split * 2 * PADDED, gate, mask=token < count)
        gl.store(partials_at + split * 2 * PADDED + PADDED, up, mask=token < count)
        if _arrives_last(semaphores + first * BLOCKS + block, SPLIT):
            gate = gl.full_like(gate, 0.0)
            up = gl.full_like(up, 0.0)
            for part in gl.static_range(SPLIT):
                gate += gl.load(partials_at + part * 2 * PADDED, mask=inside, other=0.0, cache_modifier=".cg")
                up += gl.load(partials_at + part * 2 * PADDED + PADDED, mask=inside, other=0.0, cache_modifier=".cg")
            inner = _down_inputs(gate, up, block * 64, ROWS, PRECISIONS, ACTIVATION, TOKENS, WARPS)
            gl.store(hidden_at, inner.to(hidden.dtype.element_ty), mask=inside)


@gluon.jit
def _down_inputs(
    gate, up, first, ROWS: gl.constexpr, PRECISIONS: gl.constexpr, ACTIVATION: gl.constexpr, TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Return the inputs of down, rotated for lattice codes.

    This is what activation.down_inputs does.
    """
    values = _gated(gate, up, ACTIVATION)
    BLOCK: gl.constexpr = down_rotation(ROWS, PRECISIONS)
    if BLOCK > 0:
        row = first + gl.arange(0, 64, gl.SliceLayout(0, spread_layout(WARPS)))
        number = row.to(gl.uint32) * 0x9E3779B1
        number = (number ^ (number >> 15)) * 0x85EBCA77
        values = gl.where((((number ^ (number >> 13)) & 1) == 0)[None, :], values, -values)
        for power in gl.static_range(0, 6):
            if (2 << power) <= BLOCK:
                values = _pairs(values, 1 << power, TOKENS, WARPS)
        values = values * (BLOCK**-0.5)
    return values


@gluon.jit
def _pairs(values, HALF: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr):
    """Replace values that are HALF columns apart by their sum and difference.

    This is what rotate._pairs does.
    """
    pairs = values.reshape([TOKENS, 32 // HALF, 2, HALF])
    second = gl.arange(0, 2, only(pairs.type.layout, 2, 4))[None, None, :, None] == 1
    sums = gl.sum(pairs, 2, keep_dims=True)
    differences = gl.sum(gl.where(second, -pairs, pairs), 2, keep_dims=True)
    both = gl.where(second, differences, sums).reshape([TOKENS, 64])
    return gl.convert_layout(both, spread_layout(WARPS))


@gluon.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def mma_down_kernel(
    hidden,
    out,
    addresses,
    destinations,
    residual,
    residual_destinations,
    bits,
    items,
    pairs,
    weights,
    computed,
    partials,
    semaphores,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    PRECISIONS: gl.constexpr,
    NESTED: gl.constexpr,
    STEPS: gl.constexpr,
    ORDERED: gl.constexpr,
    BIAS: gl.constexpr,
    TOP_K: gl.constexpr,
    WEIGHTED: gl.constexpr,
    SPLIT: gl.constexpr,
    FETCH: gl.constexpr,
    WARPS: gl.constexpr,
    MOST: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Compute down projections; see decode.down_kernel.

    If WEIGHTED, also compute the weighted sum of a token's experts. DEPENDENT: gate and up may still run when this
    begins. Until they have ended, programs only fetch, and load their first codes: bytes of experts depend on no
    activation, but hidden states, partial sums and semaphores are theirs.
    """
    item = gl.program_id(1)
    expert = gl.load(items + 3 * item)
    first = gl.load(items + 3 * item + 1)
    last = gl.load(items + 3 * item + 2)
    zeros_to = first
    if WEIGHTED:
        zeros_to = gl.where(expert < 0, last, first)
        last = gl.where(expert < 0, first, last)
        expert = gl.maximum(expert, 0)
    section = gl.load(addresses + 3 * expert + 2)
    lower = _lower(residual + 3 * expert + 2, NESTED)
    width = gl.load(bits + 3 * expert + 2)
    if FETCH:
        destination = gl.load(destinations + 3 * expert + 2)
        if (destination != 0) & (last > first):
            _fetch_share(
                section, destination, width, gl.program_id(0), gl.program_id(2),
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, ORDERED, BIAS, SPLIT, WARPS,
            )  # fmt: skip
            barrier()
            section = destination
        if NESTED > 0:
            lower_destination = gl.load(residual_destinations + 3 * expert + 2)
            if (lower_destination != 0) & (last > first):
                _fetch_residual(
                    lower, lower_destination, gl.program_id(0), gl.program_id(2), COLUMNS, GROUP, NESTED, SPLIT, WARPS
                )
                barrier()
                lower = lower_destination
    if WEIGHTED:
        if zeros_to > first:
            if DEPENDENT:
                gdc_wait()
            _write_zeros(out, computed, first, zeros_to, ROWS, TOP_K)
    if MOST > 8 and last - first > 8:
        for at in range(first, last, 16):
            _down(
                hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores, at, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOP_K, WEIGHTED, 16, SPLIT, WARPS,
                DEPENDENT,
            )  # fmt: skip
    elif last > first:
        _down(
            hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores, first, last,
            ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOP_K, WEIGHTED, 8, SPLIT, WARPS,
            DEPENDENT,
        )  # fmt: skip
    if DEPENDENT:  # also in programs without positions
        gdc_wait()


@gluon.jit
def _down(
    hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores, first, last,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUP: gl.constexpr, PRECISIONS: gl.constexpr, NESTED: gl.constexpr,
    STEPS: gl.constexpr, ORDERED: gl.constexpr, BIAS: gl.constexpr, TOP_K: gl.constexpr, WEIGHTED: gl.constexpr,
    TOKENS: gl.constexpr, SPLIT: gl.constexpr, WARPS: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Compute up to TOKENS positions from `first` on."""
    FLOAT16: gl.constexpr = hidden.dtype.element_ty == gl.float16
    BLOCKS: gl.constexpr = (ROWS + 63) // 64
    PADDED: gl.constexpr = BLOCKS * 64
    block = gl.program_id(0)
    split = gl.program_id(2)
    count = gl.minimum(last - first, TOKENS)
    sums = mma_products(
        section, lower, width, block, hidden, pairs, first, count, split,
        ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, False, TOKENS, SPLIT, WARPS, FLOAT16, DEPENDENT,
    )  # fmt: skip
    LAYOUT: gl.constexpr = spread_layout(WARPS)
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))[:, None]
    pair = gl.load(pairs + first + token, mask=token < count, other=0).to(gl.int64)
    row = block * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    inside = (token < count) & (row < ROWS)
    if WEIGHTED:
        gl.store(partials + (pair * SPLIT + split) * PADDED + row, sums, mask=token < count)
        for position in range(first, first + count):
            at = gl.load(pairs + position) // TOP_K
            _add_experts(
                out, weights, computed, partials, semaphores + at * BLOCKS + block, at, block, ROWS, TOP_K, SPLIT
            )
    elif SPLIT == 1:
        gl.store(out + pair * ROWS + row, sums.to(out.dtype.element_ty), mask=inside)
    else:
        partials_at = partials + (first + token).to(gl.int64) * (SPLIT * PADDED) + row
        gl.store(partials_at + split * PADDED, sums, mask=token < count)
        if _arrives_last(semaphores + first * BLOCKS + block, SPLIT):
            sums = gl.full_like(sums, 0.0)
            for part in gl.static_range(SPLIT):
                sums += gl.load(partials_at + part * PADDED, mask=inside, other=0.0, cache_modifier=".cg")
            gl.store(out + pair * ROWS + row, sums.to(out.dtype.element_ty), mask=inside)
