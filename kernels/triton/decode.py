"""Decode: few tokens per expert, bound by memory bandwidth.

There are two launches for all experts of a step.

A program computes 64 rows of one expert's projection, or one of SPLIT parts of their columns. Partial sums go to
memory in float32. A semaphore counts the programs that have finished, and the last one adds the partial sums in
ascending order, so the result does not depend on which program was last: integers are counted atomically, floats
never. A program that fetches copies exactly the bytes it computes from and shares sums like any other, so fetching
does not change any bit.

Launches are described by device tensors; `int` is int32 or int64, as the launch has it.

    addresses     int64 [experts, 3]     sections of gate, up and down
    destinations  int64 [experts, 3]     where to store a copy of them, 0 for nowhere (FETCH)
    residual      int64 [experts, 3]     residual sections, for NESTED bits
    residual_destinations  like destinations
    bits          int32 [experts, 3]     16, 8, 4 or 2, or a codebook's tag
    items         int32 [items, 3]       expert, first and last + 1 of its positions; expert -1 asks for zeros in the
                                         tokens first to last that have no computed pair (WEIGHTED)
    rows          int [positions]        row of x of each (token, expert) pair, sorted by expert
    pairs         int [positions]        row of the output, token * top_k + k
    semaphores    int32, zeros before and after, [positions, blocks] where programs share sums, [tokens, blocks] if
                  WEIGHTED

ROWS and COLUMNS are those of the projection. PRECISIONS is the sum of the bits that may occur. NESTED are the bits
whose codes are stored in two sections, or 0. STEPS and ORDERED are sums of the bits whose zeros count steps of their
scale, and whose columns are reordered. SPLIT is the number of parts of the columns, WARPS the launch's num_warps.
"""

import triton
import triton.language as tl

from vllm_dymoe.kernels.triton.activation import down_inputs
from vllm_dymoe.kernels.triton.combine import rounded, widened
from vllm_dymoe.kernels.triton.fetch import fetch_residual, fetch_share
from vllm_dymoe.kernels.triton.rows import row_products
from vllm_dymoe.kernels.triton.section import DESCRIPTIONS


@triton.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def gate_up_kernel(
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISIONS: tl.constexpr,
    NESTED: tl.constexpr,
    STEPS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SPLIT: tl.constexpr,
    FETCH: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Compute hidden states: activation(gate x[row]) * up x[row].

    The result goes to hidden[position]; grid [blocks of 64 rows, items, SPLIT].

    Args:
        x: [tokens, COLUMNS] bfloat16 or float16.
        hidden: [positions, ROWS], dtype of x, overwritten.
        partials: float32 [positions, SPLIT, 2, 64 * blocks], scratch if programs share a sum.
        ACTIVATION: see activation.constants.
    """
    item = tl.program_id(1)
    expert = tl.load(items + 3 * item)
    first = tl.load(items + 3 * item + 1)
    last = tl.load(items + 3 * item + 2)
    source = addresses + 3 * expert
    lower = residual + 3 * expert
    if FETCH:
        if last > first:
            source, lower = _fetch_two(
                source, destinations + 3 * expert, lower, residual_destinations + 3 * expert, bits + 3 * expert,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, ORDERED, BIAS, 0 if ACTIVATION[4] else 1, SPLIT, WARPS,
            )  # fmt: skip
        # An expert has one item however many positions it has, and is computed as if it had one item for every two.
        if (last - first) % 2 == 1:
            _gate_up(
                x, hidden, source, lower, bits + 3 * expert, rows, partials, semaphores, last - 1, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, ACTIVATION, 1, SPLIT, WARPS,
            )  # fmt: skip
        for number in range((last - first) // 2):
            _gate_up(
                x, hidden, source, lower, bits + 3 * expert, rows, partials, semaphores, first + 2 * number, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, ACTIVATION, 2, SPLIT, WARPS,
            )  # fmt: skip
    elif last - first == 1:
        _gate_up(
            x, hidden, source, lower, bits + 3 * expert, rows, partials, semaphores, first, last,
            ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, ACTIVATION, 1, SPLIT, WARPS,
        )  # fmt: skip
    else:
        for number in range((last - first + 1) // 2):
            _gate_up(
                x, hidden, source, lower, bits + 3 * expert, rows, partials, semaphores, first + 2 * number, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, ACTIVATION, 2, SPLIT, WARPS,
            )  # fmt: skip


@triton.jit
def _fetch_two(
    source, destination, lower, lower_destination, bits,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PRECISIONS: tl.constexpr, NESTED: tl.constexpr,
    ORDERED: tl.constexpr, BIAS: tl.constexpr, FIRST: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Fetch this program's shares of gate and up if they have destinations.

    Returns where to read the addresses afterwards.

    FIRST is 1 for experts without a gate.
    """
    if tl.load(destination + FIRST) != 0:
        for number in range(FIRST, 2):
            fetch_share(
                tl.load(source + number), tl.load(destination + number), tl.load(bits + number),
                tl.program_id(0), tl.program_id(2),
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, ORDERED, BIAS, SPLIT, WARPS,
            )  # fmt: skip
        tl.debug_barrier()
        source = destination
    if NESTED > 0:
        if tl.load(lower_destination + FIRST) != 0:
            for number in range(FIRST, 2):
                fetch_residual(
                    tl.load(lower + number), tl.load(lower_destination + number), tl.program_id(0), tl.program_id(2),
                    COLUMNS, GROUP, NESTED, SPLIT, WARPS,
                )  # fmt: skip
            tl.debug_barrier()
            lower = lower_destination
    return source, lower


@triton.jit
def _gate_up(
    x, hidden, source, lower, bits, rows, partials, semaphores, first, last,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PRECISIONS: tl.constexpr, NESTED: tl.constexpr,
    STEPS: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr, TOKENS: tl.constexpr,
    SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute one or two positions from `first` on."""
    FLOAT16: tl.constexpr = x.dtype.element_ty == tl.float16
    block = tl.program_id(0)
    split = tl.program_id(2)
    x_first, apart = _two_rows(x, rows, first, last, COLUMNS, TOKENS)
    gate = tl.zeros([TOKENS, 64], tl.float32)
    up = tl.zeros([TOKENS, 64], tl.float32)
    for number in range(0 if ACTIVATION[4] else 1, 2):  # a loop, so that the products are compiled once
        gate = up
        up = row_products(
            tl.load(source + number), _lower(lower + number, NESTED), tl.load(bits + number),
            block, x_first, apart, split,
            ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOKENS, SPLIT, WARPS, FLOAT16,
        )  # fmt: skip
    position = first + tl.arange(0, TOKENS)[:, None]
    row = block * 64 + tl.arange(0, 64)[None, :]
    inside = (position < last) & (row < ROWS)
    hidden_at = hidden + position.to(tl.int64) * ROWS + row
    if SPLIT == 1:
        inner = down_inputs(gate, up, block * 64, ROWS, PRECISIONS, ACTIVATION)
        tl.store(hidden_at, inner.to(hidden.dtype.element_ty), mask=inside)
    else:
        BLOCKS: tl.constexpr = (ROWS + 63) // 64
        PADDED: tl.constexpr = BLOCKS * 64
        partials_at = partials + position.to(tl.int64) * (SPLIT * 2 * PADDED) + row
        tl.store(partials_at + split * 2 * PADDED, gate, mask=position < last)
        tl.store(partials_at + split * 2 * PADDED + PADDED, up, mask=position < last)
        if arrives_last(semaphores + first * BLOCKS + block, SPLIT):
            gate = tl.zeros([TOKENS, 64], tl.float32)
            up = tl.zeros([TOKENS, 64], tl.float32)
            for part in tl.static_range(SPLIT):
                gate += tl.load(partials_at + part * 2 * PADDED, mask=inside, other=0.0, cache_modifier=".cg")
                up += tl.load(partials_at + part * 2 * PADDED + PADDED, mask=inside, other=0.0, cache_modifier=".cg")
            inner = down_inputs(gate, up, block * 64, ROWS, PRECISIONS, ACTIVATION)
            tl.store(hidden_at, inner.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def _lower(at, NESTED: tl.constexpr):
    """Return the address of a residual section, if there is one."""
    if NESTED > 0:
        return tl.load(at)
    else:
        return tl.cast(0, tl.int64)


@triton.jit
def _two_rows(x, rows, first, last, COLUMNS: tl.constexpr, TOKENS: tl.constexpr):
    """Return the pointer to a position's row, and the distance to the next one's.

    The distance is 0 after the last position.
    """
    row = tl.load(rows + first).to(tl.int64)
    apart = row - row
    if TOKENS == 2:
        apart = tl.load(rows + tl.minimum(first + 1, last - 1)).to(tl.int64) - row
    return x + row * COLUMNS, apart * COLUMNS


@triton.jit
def arrives_last(semaphore, count):
    """Return whether this program is the last of `count` to arrive.

    The last one sees what the others stored before. The semaphore is zero again afterwards.
    """
    tl.debug_barrier()  # every thread's stores precede the one thread that counts
    is_last = tl.atomic_add(semaphore, 1, sem="acq_rel") == count - 1
    tl.debug_barrier()
    if is_last:
        tl.store(semaphore, 0)
    return is_last


@triton.jit(do_not_specialize_on_alignment=DESCRIPTIONS)
def down_kernel(
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
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISIONS: tl.constexpr,
    NESTED: tl.constexpr,
    STEPS: tl.constexpr,
    ORDERED: tl.constexpr,
    BIAS: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SPLIT: tl.constexpr,
    FETCH: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Down projections; grid [blocks of 64 rows, items, SPLIT].

    If WEIGHTED, out[token] = sum over its computed k, ascending, of weights[token, k] * down(hidden of the pair). Every
    other row of `out` keeps its contents, or becomes zero if an item asks for it. Otherwise out[pair] = down(hidden of
    the pair).

    Args:
        hidden: [positions, COLUMNS] as gate_up_kernel left it.
        out: [tokens, ROWS] if WEIGHTED, else [tokens * TOP_K, ROWS].
        weights: float32 [tokens, TOP_K], the router's, if WEIGHTED.
        computed: int32 [tokens, TOP_K], 1 for pairs that this launch computes, else 0, if WEIGHTED.
        partials: float32 [pairs, SPLIT, 64 * blocks], scratch if WEIGHTED; [positions, ...] if only programs share
            sums.
    """
    item = tl.program_id(1)
    expert = tl.load(items + 3 * item)
    first = tl.load(items + 3 * item + 1)
    last = tl.load(items + 3 * item + 2)
    if WEIGHTED:
        if expert < 0:
            _write_zeros(out, computed, first, last, ROWS, TOP_K)
        last = tl.where(expert < 0, first, last)
        expert = tl.maximum(expert, 0)
    section = tl.load(addresses + 3 * expert + 2)
    lower = _lower(residual + 3 * expert + 2, NESTED)
    width = tl.load(bits + 3 * expert + 2)
    if FETCH:
        destination = tl.load(destinations + 3 * expert + 2)
        if (destination != 0) & (last > first):
            fetch_share(
                section, destination, width, tl.program_id(0), tl.program_id(2),
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, ORDERED, BIAS, SPLIT, WARPS,
            )  # fmt: skip
            tl.debug_barrier()
            section = destination
        if NESTED > 0:
            lower_destination = tl.load(residual_destinations + 3 * expert + 2)
            if (lower_destination != 0) & (last > first):
                fetch_residual(
                    lower, lower_destination, tl.program_id(0), tl.program_id(2), COLUMNS, GROUP, NESTED, SPLIT, WARPS
                )
                tl.debug_barrier()
                lower = lower_destination
        if (last - first) % 2 == 1:
            _down(
                hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores, last - 1, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOP_K, WEIGHTED, 1, SPLIT, WARPS,
            )  # fmt: skip
        for number in range((last - first) // 2):
            _down(
                hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores,
                first + 2 * number, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOP_K, WEIGHTED, 2, SPLIT, WARPS,
            )  # fmt: skip
    elif last - first == 1:
        _down(
            hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores, first, last,
            ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOP_K, WEIGHTED, 1, SPLIT, WARPS,
        )  # fmt: skip
    else:
        for number in range((last - first + 1) // 2):
            _down(
                hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores,
                first + 2 * number, last,
                ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOP_K, WEIGHTED, 2, SPLIT, WARPS,
            )  # fmt: skip


@triton.jit
def _write_zeros(out, computed, first, last, ROWS: tl.constexpr, TOP_K: tl.constexpr):
    """Write 64 zero rows for each token that no other program sums."""
    row = tl.program_id(0) * 64 + tl.arange(0, 64)
    if tl.program_id(2) == 0:
        for token in range(first, last):
            count = 0
            for k in tl.static_range(TOP_K):
                count += tl.load(computed + token * TOP_K + k)
            at = out + tl.cast(token, tl.int64) * ROWS + row
            tl.store(at, tl.zeros([64], out.dtype.element_ty), mask=row < tl.where(count == 0, ROWS, 0))


@triton.jit
def _down(
    hidden, out, section, lower, width, pairs, weights, computed, partials, semaphores, first, last,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, PRECISIONS: tl.constexpr, NESTED: tl.constexpr,
    STEPS: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr, SPLIT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Compute one or two positions from `first` on."""
    FLOAT16: tl.constexpr = hidden.dtype.element_ty == tl.float16
    BLOCKS: tl.constexpr = (ROWS + 63) // 64
    PADDED: tl.constexpr = BLOCKS * 64
    block = tl.program_id(0)
    split = tl.program_id(2)
    h_first = hidden + first.to(tl.int64) * COLUMNS
    apart = (tl.minimum(first + 1, last - 1) - first).to(tl.int64) * COLUMNS
    sums = row_products(
        section, lower, width, block, h_first, apart, split,
        ROWS, COLUMNS, GROUP, PRECISIONS, NESTED, STEPS, ORDERED, BIAS, TOKENS, SPLIT, WARPS, FLOAT16,
    )  # fmt: skip
    position = first + tl.arange(0, TOKENS)[:, None]
    pair = tl.load(pairs + position, mask=position < last, other=0)
    row = block * 64 + tl.arange(0, 64)[None, :]
    inside = (position < last) & (row < ROWS)
    if WEIGHTED:
        tl.store(partials + (pair.to(tl.int64) * SPLIT + split) * PADDED + row, sums, mask=position < last)
        for token_number in tl.static_range(TOKENS):
            if first + token_number < last:
                token = tl.load(pairs + first + token_number) // TOP_K
                add_experts(
                    out, weights, computed, partials, semaphores + token * BLOCKS + block, token, block,
                    ROWS, TOP_K, SPLIT,
                )  # fmt: skip
    else:
        out_at = out + pair.to(tl.int64) * ROWS + row
        if SPLIT == 1:
            tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside)
        else:
            partials_at = partials + position.to(tl.int64) * (SPLIT * PADDED) + row
            tl.store(partials_at + split * PADDED, sums, mask=position < last)
            if arrives_last(semaphores + first * BLOCKS + block, SPLIT):
                sums = tl.zeros([TOKENS, 64], tl.float32)
                for part in tl.static_range(SPLIT):
                    sums += tl.load(partials_at + part * PADDED, mask=inside, other=0.0, cache_modifier=".cg")
                tl.store(out_at, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit
def add_experts(
    out, weights, computed, partials, semaphore, token, block,
    ROWS: tl.constexpr, TOP_K: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Write 64 rows of a token's output if all of its experts have come.

    They are the sum in ascending k, parts ascending. The bits are those of unweighted outputs that ``combine`` sums.
    """
    PADDED: tl.constexpr = (ROWS + 63) // 64 * 64
    count = 0
    for k in tl.static_range(TOP_K):
        count += tl.load(computed + token * TOP_K + k)
    if arrives_last(semaphore, count * SPLIT):
        row = block * 64 + tl.arange(0, 64)
        total = tl.zeros([64], tl.float32)
        for k in tl.static_range(TOP_K):
            pair = token * TOP_K + k
            counts = tl.load(computed + pair) != 0
            sums = tl.zeros([64], tl.float32)
            for part in tl.static_range(SPLIT):
                at = partials + (pair.to(tl.int64) * SPLIT + part) * PADDED + row
                sums += tl.load(at, mask=row < tl.where(counts, PADDED, 0), other=0.0, cache_modifier=".cg")
            # Round as if each expert's output were stored and then combined: before and after the weight. The select
            # between product and sum keeps compilers from fusing them into one instruction, which would round once.
            weighted = widened(rounded(sums, out.dtype.element_ty)) * tl.load(weights + pair)
            total += tl.where(row < tl.where(counts, PADDED, 0), weighted, 0.0)
        tl.store(out + token.to(tl.int64) * ROWS + row, rounded(total, out.dtype.element_ty), mask=row < ROWS)
