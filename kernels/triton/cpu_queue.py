"""The device's part of a CPU queue, in three small launches.

They run around the launches that compute, without driver calls in between. Plain twins: ``post_plain`` and
``collect_plain`` of ``vllm_dymoe.kernels.cpu_queue``, which describes the memory. A graph's own memory operation
(cuStreamWaitValue64) would occupy no multiprocessor, but compares with a constant of the capture; only a number that
grows keeps a late answer from counting for the next step. So one warp waits.
"""

import ctypes
from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_dymoe.experts.checks import check_tensor
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.combine import Pairs
from vllm_dymoe.kernels.cpu_queue import QueueShape
from vllm_dymoe.kernels.triton.combine import combine_on_gpu
from vllm_dymoe.kernels.triton.start import Start, run_kernel

_CONTROL = ctypes.sizeof(native.QueueControl)
_ANSWERED = tl.constexpr(native.QueueControl.answered.offset)
_BLOCK = 1024
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter knows no assembly


class DeviceQueue(NamedTuple):
    """The device's view of a CPU queue: the ring's sizes, and the device's state."""

    shape: QueueShape
    turn: Tensor  # int64 [3], see ``kernels.cpu_queue``
    present: Tensor  # int32, scratch for the pairs of a step

    @property
    def constants(self) -> dict[str, int]:
        """Constants of the ring for the programs."""
        shape, entry = self.shape, self.shape.places[-1]
        return {"CONTROL": _CONTROL, "DEPTH": shape.depth, "ENTRY": entry, "HIDDEN": shape.hidden, "BLOCK": _BLOCK}


def post(
    device_queue: DeviceQueue, layer: int, x: Tensor, ids: Tensor, rows: Tensor, plan: Mapping[str, Tensor],
    weights: Tensor | None = None, *, followed: bool = False, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Run ``post_plain`` on the device, for the real tokens.

    ``rows`` is int32 [1], the number of real tokens; ``plan`` has the tensors of a LayerPlan, by name. ``weights`` are
    None unless they multiply the experts' inputs. ``followed``: the next launch overlaps this one (``start.Overlap``).
    """
    shape = device_queue.shape
    check_tensor("x", x, shape=(None, shape.hidden), dtype=shape.dtype)
    check_tensor("turn", device_queue.turn, shape=(3,), dtype=torch.int64)
    if len(x) > shape.tokens:
        raise ValueError(f"a step has {len(x)} tokens, but the CPU queue was made for {shape.tokens}")
    items, addresses = len(plan["experts"]), plan["addresses"]
    listed = (plan[name] for name in ("count", "action", "experts", "bits"))
    sizes = {"NESTED": len(addresses) > 1, "WIDTH": max(32, triton.next_power_of_2(items)), "ITEMS": items}
    places = dict(zip(("CALLS", "IDS", "WEIGHTS", "X"), shape.places, strict=False)) | {"TOP_K": shape.top_k}
    places |= {"ON_INPUT": weights is not None, "FOLLOWED": followed}
    given = device_queue.turn, x, ids, x if weights is None else weights, rows, *listed, addresses[0], addresses[-1]
    start(post_kernel, (1,), (*given, layer, len(x)), device_queue.constants | places | sizes, {"num_warps": 4})


def wait(turn: Tensor, *, start: Start = run_kernel) -> None:
    """Wait until the layer's entry is answered; see ``wait_kernel``."""
    start(wait_kernel, (1,), (turn,), {}, {"num_warps": 1})


def take(device_queue: DeviceQueue, rows_out: Tensor, computed: Tensor, *, start: Start = run_kernel) -> None:
    """Copy the CPU's rows to `rows_out`; see ``collect_kernel``.

    Which pairs count is written to `device_queue.present`.
    """
    arguments = device_queue.turn, rows_out, computed, device_queue.present
    constants = device_queue.constants | {"OUT": device_queue.shape.places[4]}
    start(collect_kernel, (computed.numel(),), arguments, constants, {"num_warps": 4})


def collect(
    device_queue: DeviceQueue,
    rows_out: Tensor,
    computed: Tensor,
    weights: Tensor,
    out: Tensor,
    *,
    start: Start = run_kernel,
) -> None:
    """Wait for the answer, copy its rows, and sum each token's experts.

    Sums are in the router's order, into out [tokens, hidden].

    The CPU's rows are written unweighted to rows_out [tokens * top_k, hidden]; ``computed`` is int32 [tokens, top_k], 0
    for pairs without an expert here and 2 for the CPU's; ``weights`` are float32 [tokens, top_k].
    """
    wait(device_queue.turn, start=start)
    take(device_queue, rows_out, computed, start=start)
    present = device_queue.present[: computed.numel()].view(computed.shape)
    combine_on_gpu(Pairs(rows_out, weights, present, None, False), out, start=start)


@triton.jit(
    do_not_specialize_on_alignment=[
        "turn", "x", "ids", "weights", "rows", "count", "action", "experts", "bits", "addresses", "residual",
    ],
    do_not_specialize=["layer", "tokens"],
)  # fmt: skip
def post_kernel(
    turn, x, ids, weights, rows, count, action, experts, bits, addresses, residual,
    layer: tl.int32, tokens: tl.int32,
    CONTROL: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, CALLS: tl.constexpr, IDS: tl.constexpr,
    WEIGHTS: tl.constexpr, X: tl.constexpr, ON_INPUT: tl.constexpr, FOLLOWED: tl.constexpr, TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr, NESTED: tl.constexpr, WIDTH: tl.constexpr, ITEMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill the next entry and write its number.

    Grid [1], so that one barrier follows all of its stores. FOLLOWED: the next launch begins at once; it may read what
    this one reads, but nothing that it writes.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    real = tl.minimum(tl.load(rows), tokens)
    item = tl.arange(0, WIDTH)
    on_cpu = (tl.load(action + item, mask=item < ITEMS, other=0) == 3) & (item < tl.load(count))
    some = tl.sum(on_cpu.to(tl.int32), 0)
    queue = tl.load(turn + 2)
    number = tl.load(turn) + tl.where(some > 0, 1, 0).to(tl.int64)
    tl.debug_barrier()
    tl.store(turn, number)
    tl.store(turn + 1, tl.where(some > 0, number, 0))
    if some > 0:
        entry = queue + CONTROL + number % DEPTH * ENTRY
        header = entry.to(tl.pointer_type(tl.int64))
        tl.store(header, number)
        tl.store(header + 1, layer.to(tl.int64))
        tl.store(header + 2, real.to(tl.int64))
        tl.store(header + 3, some.to(tl.int64))
        tl.store(header + 6, number * 0 + (1 if ON_INPUT else 0))
        call = (entry + CALLS).to(tl.pointer_type(tl.int64)) + 8 * (tl.cumsum(on_cpu.to(tl.int32), 0) - 1)
        tl.store(call, tl.load(experts + item, mask=on_cpu, other=0).to(tl.int64), mask=on_cpu)
        tl.store(call + 1, tl.load(bits + 3 * item + 1, mask=on_cpu, other=0).to(tl.int64), mask=on_cpu)
        for column in tl.static_range(3):
            tl.store(call + 2 + column, tl.load(addresses + 3 * item + column, mask=on_cpu, other=0), mask=on_cpu)
            lower = tl.zeros([WIDTH], tl.int64)
            if NESTED:
                lower = tl.load(residual + 3 * item + column, mask=on_cpu, other=0)
            tl.store(call + 5 + column, lower, mask=on_cpu)
        lane = tl.arange(0, BLOCK)
        chosen = (entry + IDS).to(tl.pointer_type(tl.int32))
        for first in range(0, real * TOP_K, BLOCK):
            inside = first + lane < real * TOP_K
            tl.store(chosen + first + lane, tl.load(ids + first + lane, mask=inside).to(tl.int32), mask=inside)
            if ON_INPUT:
                given = (entry + WEIGHTS).to(tl.pointer_type(tl.float32))
                tl.store(given + first + lane, tl.load(weights + first + lane, mask=inside), mask=inside)
        words: tl.constexpr = tl.int64 if HIDDEN % 4 == 0 else tl.int16  # type of the words that cross the link
        wide: tl.constexpr = HIDDEN // 4 if HIDDEN % 4 == 0 else HIDDEN
        source = x.to(tl.pointer_type(words))
        inputs = (entry + X).to(tl.pointer_type(words))
        for first in range(0, real * wide, BLOCK):
            inside = first + lane < real * wide
            tl.store(inputs + first + lane, tl.load(source + first + lane, mask=inside), mask=inside)
        tl.debug_barrier()
        _release(queue, number)


@triton.jit
def _release(address, number):
    """Store a number after everything that the program has stored.

    It is then visible to all processors of the machine. This is a release store and not an exchange, which would read
    over PCIe, where not every platform supports atomics. One thread stores.
    """
    if _INTERPRETED:
        tl.atomic_xchg(address.to(tl.pointer_type(tl.int64)), number, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
                .reg .pred first;
                .reg .b32 thread;
                mov.u32 thread, %tid.x;
                setp.eq.u32 first, thread, 0;
                @first st.release.sys.global.u64 [$1], $2;
                mov.u32 $0, 0;
            }""",
            "=r,l,l", [address, number], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


def ask(device_queue: DeviceQueue, layer: int, plan: Mapping[str, Tensor], *, start: Start = run_kernel) -> None:
    """Run ``ask_plain`` on the device."""
    items, slices = len(plan["experts"]), len(plan["action"])
    listed = (plan[name] for name in ("count", "action", "experts", "precisions"))
    sizes = {"SLICES": slices, "WIDTH": max(32, triton.next_power_of_2(items)), "ITEMS": items}
    arguments = device_queue.turn, *listed, layer, plan["action"].stride(0)
    start(ask_kernel, (1,), arguments, _of_calls(device_queue) | sizes, {"num_warps": 4})


def take_sources(
    device_queue: DeviceQueue, table: Mapping[str, Tensor], layer: int, plan: Mapping[str, Tensor],
    *, followed: bool = False, start: Start = run_kernel,
) -> None:  # fmt: skip
    """Run ``take_plain`` on the device.

    ``followed``: the next launch overlaps this one (``start.Overlap``).
    """
    wait(device_queue.turn, start=start)
    items, slices = len(plan["experts"]), len(plan["action"])
    layers, experts = table["precision"].shape
    names = "precision", "slot", "source", "first_slot", "pool", "slot_bytes", "offsets", "unread"
    of_table = (table[name] for name in names)
    of_plan = (plan[name] for name in ("count", "action", "experts", "precisions", "addresses", "destinations"))
    sizes = {"SLICES": slices, "WIDTH": max(32, triton.next_power_of_2(items)), "ITEMS": items, "EXPERTS": experts}
    sizes["FOLLOWED"] = followed
    numbers = layer, layers, plan["action"].stride(0), plan["addresses"].stride(0)
    arguments = device_queue.turn, *of_table, *of_plan, *numbers
    start(take_sources_kernel, (1,), arguments, _of_calls(device_queue) | sizes, {"num_warps": 4})


def _of_calls(device_queue: DeviceQueue) -> dict[str, int]:
    constants = device_queue.constants
    return {name: constants[name] for name in ("CONTROL", "DEPTH", "ENTRY")} | {"CALLS": device_queue.shape.places[0]}


@triton.jit
def _asked(action, count, item, apart, ITEMS: tl.constexpr, SLICES: tl.constexpr):
    """Return whether an item's bytes have to come from the store.

    The result is int32 [WIDTH] for the first slice and for the second.
    """
    known = (item < ITEMS) & (item < tl.load(count))
    first = tl.load(action + item, mask=known, other=0)
    base = ((first == 1) | (first == 2)).to(tl.int32)
    residual = tl.zeros_like(base)
    if SLICES > 1:
        second = tl.load(action + apart + item, mask=known, other=0)
        residual = ((second == 1) | (second == 2)).to(tl.int32)
    return base, residual


@triton.jit(
    do_not_specialize_on_alignment=["turn", "count", "action", "experts", "precisions"],
    do_not_specialize=["layer", "apart"],
)
def ask_kernel(
    turn, count, action, experts, precisions, layer: tl.int32, apart: tl.int32,
    CONTROL: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, CALLS: tl.constexpr, SLICES: tl.constexpr,
    WIDTH: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Fill the next entry and write its number; grid [1]. See ``Ask`` for the fields."""
    item = tl.arange(0, WIDTH)
    base, residual = _asked(action, count, item, apart, ITEMS, SLICES)
    asked = (base + residual) > 0
    some = tl.sum(asked.to(tl.int32), 0)
    queue = tl.load(turn + 2)
    number = tl.load(turn) + tl.where(some > 0, 1, 0).to(tl.int64)
    tl.debug_barrier()
    tl.store(turn, number)
    tl.store(turn + 1, tl.where(some > 0, number, 0))
    if some > 0:
        entry = queue + CONTROL + number % DEPTH * ENTRY
        header = entry.to(tl.pointer_type(tl.int64))
        tl.store(header, number)
        tl.store(header + 1, layer.to(tl.int64))
        tl.store(header + 2, number * 0)
        tl.store(header + 3, some.to(tl.int64))
        call = (entry + CALLS).to(tl.pointer_type(tl.int64)) + 8 * (tl.cumsum(asked.to(tl.int32), 0) - 1)
        tl.store(call, tl.load(experts + item, mask=asked, other=0).to(tl.int64), mask=asked)
        tl.store(call + 1, tl.load(precisions + item, mask=asked, other=0).to(tl.int64), mask=asked)
        tl.store(call + 2, base.to(tl.int64), mask=asked)
        tl.store(call + 3, residual.to(tl.int64), mask=asked)
        tl.debug_barrier()
        _release(queue, number)


@triton.jit(
    do_not_specialize_on_alignment=[
        "turn", "precision", "slot", "source", "first_slot", "pool", "slot_bytes", "offsets", "unread", "count",
        "action", "experts", "precisions", "addresses", "destinations",
    ],
    do_not_specialize=["layer", "layers", "apart", "addresses_apart"],
)  # fmt: skip
def take_sources_kernel(
    turn, precision, slot, source, first_slot, pool, slot_bytes, offsets, unread, count, action, experts, precisions,
    addresses, destinations,
    layer: tl.int32, layers: tl.int32, apart: tl.int32, addresses_apart: tl.int32,
    CONTROL: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, CALLS: tl.constexpr, SLICES: tl.constexpr,
    WIDTH: tl.constexpr, ITEMS: tl.constexpr, EXPERTS: tl.constexpr, FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Write where the answer has put what was asked for.

    It runs after :func:`wait_kernel`; grid [1]. FOLLOWED: the next launch begins at once, and waits for this one's end.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    number = tl.load(turn + 1)
    if number > 0:
        item = tl.arange(0, WIDTH)
        base, residual = _asked(action, count, item, apart, ITEMS, SLICES)
        asked = (base + residual) > 0
        expert = tl.load(experts + item, mask=asked, other=0)
        code = tl.load(precisions + item, mask=asked, other=0)
        entry = tl.load(turn + 2) + CONTROL + number % DEPTH * ENTRY
        call = (entry + CALLS).to(tl.pointer_type(tl.int64)) + 8 * (tl.cumsum(asked.to(tl.int32), 0) - 1)
        row = layer * EXPERTS + expert
        lost = item < 0  # none
        for part in tl.static_range(SLICES):
            needs = asked & ((base if part == 0 else residual) > 0)
            version = item * 0 + (part + 1) if SLICES > 1 else code
            # Volatile, as in ``collect_kernel``: no earlier answer may come from a cache.
            address = tl.load(call + 4 + part, mask=needs, other=1, volatile=True)
            lost = lost | (address == 0)
            some = tl.load(first_slot + layer * 3 + version) * tl.load(slot_bytes + version)
            address = tl.where(address == 0, tl.load(pool + version) + some, address)
            tl.store(source + row.to(tl.int64) * 3 + version, address, mask=needs)
            for column in tl.static_range(3):
                at = addresses + part * addresses_apart + 3 * item + column
                tl.store(at, address + tl.load(offsets + 3 * version + column), mask=needs)
        for part in tl.static_range(SLICES):
            for column in tl.static_range(3):
                tl.store(destinations + part * addresses_apart + 3 * item + column, 0, mask=lost)
            tl.store(slot + part * layers * EXPERTS + row, -1, mask=lost)
        tl.store(precision + row, 0, mask=lost)
        worst = tl.max(tl.where(lost, expert, -1), 0)
        if worst >= 0:
            tl.atomic_max(unread + layer, worst.to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=["turn"])
def wait_kernel(turn):
    """Wait until the layer's entry is answered or given up; grid [1], one warp.

    Later launches read what the CPU wrote before its answer, be it rows or experts that it has read from disk.
    """
    number = tl.load(turn + 1)
    answered = tl.load(turn + 2) + _ANSWERED
    seen = _acquire(answered)
    while seen < 2 * number:
        seen = _acquire(answered)


@triton.jit
def _acquire(address):
    """Load a number, and see from now on what was written before it, by any processor.

    A volatile load would order nothing. All threads load, and later launches follow each of them.
    """
    if _INTERPRETED:
        return tl.load(address.to(tl.pointer_type(tl.int64)), volatile=True)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
        )


@triton.jit(do_not_specialize_on_alignment=["turn", "rows", "computed", "present"])
def collect_kernel(
    turn, rows, computed, present, CONTROL: tl.constexpr, DEPTH: tl.constexpr, ENTRY: tl.constexpr, OUT: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the CPU's row of a pair, and whether the pair counts.

    present[pair] < 0 if it does not. Grid [pairs].
    """
    pair = tl.program_id(0)
    kind = tl.load(computed + pair)
    tl.store(present + pair, kind - 1)
    if kind == 2:
        entry = tl.load(turn + 2) + CONTROL + tl.load(turn + 1) % DEPTH * ENTRY
        words: tl.constexpr = tl.int64 if HIDDEN % 4 == 0 else tl.int16
        wide: tl.constexpr = HIDDEN // 4 if HIDDEN % 4 == 0 else HIDDEN
        answer = (entry + OUT).to(tl.pointer_type(words)) + pair.to(tl.int64) * wide
        to = rows.to(tl.pointer_type(words)) + pair.to(tl.int64) * wide
        for first in range(0, wide, BLOCK):
            column = first + tl.arange(0, BLOCK)
            # Volatile instead of ".cv", which Triton 3.6.0 and 3.7.1 drop: no earlier answer may come from a cache.
            values = tl.load(answer + column, mask=column < wide, volatile=True)
            tl.store(to + column, values, mask=column < wide)
