"""A ring of entries through which a device asks the CPU to compute experts.

This file has its layout and the device's side. Both sides map the memory. A step on the device fills the next entry,
writes the entry's number, and continues; it waits for the answer only before it sums a token's experts. An entry holds
everything that belongs to a step, and is reused only after all other entries of the ring. ``cpu/cpu_queue.h`` is the
CPU's side, ``triton/cpu_queue.py`` is what a GPU runs, and the functions here are its plain twins.

Fields of an entry, each at a multiple of 128 bytes:

    header  int64 [7]                    number, layer, tokens, number of experts, start and end of the computation, and
                                         whether weights multiply the inputs
    calls   int64 [experts, 8]           expert, tag of its encoding, addresses of its sections and residual sections
    ids     int32 [tokens, top_k]        expert ids from the router
    weights float32 [tokens, top_k]      its weights, if they multiply the inputs
    x       [tokens, hidden]             bfloat16 or float16
    out     [tokens * top_k, hidden]     dtype of x: unweighted rows of the pairs whose expert was computed
"""

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dymoe.kernels import native
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.table import Table

ALIGNMENT = 128
HEADER, CALL = 7, 8  # int64 numbers of an entry's header, and of a call


class Entry(NamedTuple):
    """Views of one entry."""

    header: Tensor
    calls: Tensor
    ids: Tensor
    weights: Tensor
    x: Tensor
    out: Tensor


@dataclass(frozen=True)
class QueueShape:
    """The sizes that determine the layout of a ring."""

    # Number of entries; more than two steps may be posted, since one may begin while a failed one still runs.
    depth: int
    tokens: int  # most tokens of a step
    top_k: int  # experts per token
    experts: int
    hidden: int
    dtype: torch.dtype

    @cached_property
    def parts(self) -> tuple[tuple[torch.dtype, tuple[int, ...]], ...]:
        """Dtype and shape of each field of an entry."""
        pairs = self.tokens * self.top_k
        ints = (torch.int64, (HEADER,)), (torch.int64, (min(self.experts, pairs), CALL))
        return (
            *ints, (torch.int32, (self.tokens, self.top_k)), (torch.float32, (self.tokens, self.top_k)),
            (self.dtype, (self.tokens, self.hidden)), (self.dtype, (pairs, self.hidden)),
        )  # fmt: skip

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Byte offsets of calls, ids, weights, x and out in an entry, and an entry's size.

        Offsets count from the beginning of the entry.
        """
        sizes = (dtype.itemsize * prod(shape) for dtype, shape in self.parts)
        return tuple(accumulate(-(-nbytes // ALIGNMENT) * ALIGNMENT for nbytes in sizes))

    @property
    def nbytes(self) -> int:
        """Size of the whole ring."""
        return ctypes.sizeof(native.QueueControl) + self.depth * self.places[-1]


class QueueMemory:
    """A ring in memory that both sides map.

    The memory is uint8 [shape.nbytes], aligned to 128 bytes, initially zero.
    """

    def __init__(self, shape: QueueShape, memory: Tensor) -> None:
        self.shape, self.memory, self.address = shape, memory, memory.data_ptr()
        if memory.numel() < shape.nbytes or self.address % ALIGNMENT:
            raise ValueError(f"a ring needs {shape.nbytes} bytes at a multiple of {ALIGNMENT}, got {memory.numel()}")
        self.control = control = native.QueueControl.from_address(self.address)
        control.items, control.ids, control.weights, control.x, control.out, control.entry_bytes = shape.places
        control.depth, control.top_k, control.hidden = shape.depth, shape.top_k, shape.hidden
        self._entries = [self._views(number) for number in range(shape.depth)]

    def entry(self, number: int) -> Entry:
        return self._entries[number % self.shape.depth]

    def _views(self, number: int) -> Entry:
        *begins, end = 0, *self.shape.places
        entry = self.memory[ctypes.sizeof(native.QueueControl) + number * end :][:end]
        return Entry(*(
            entry[begin:][: dtype.itemsize * prod(shape)].view(dtype).view(shape)
            for begin, (dtype, shape) in zip(begins, self.shape.parts, strict=True)
        ))  # fmt: skip


def _next_entry(queue: QueueMemory, turn: Tensor, layer: int, tokens: int, calls: int) -> Entry | None:
    """Begin the next entry for so many calls; None without calls.

    ``turn`` is updated as :func:`post_plain` says.
    """
    turn[1] = 0
    if not calls:
        return None
    turn[:2] = number = int(turn[0]) + 1
    entry = queue.entry(number)
    entry.header[:4] = torch.tensor([number, layer, tokens, calls])
    return entry


def post_plain(
    queue: QueueMemory, turn: Tensor, layer: int, x: Tensor, ids: Tensor, plan: LayerPlan,
    weights: Tensor | None = None,
) -> None:  # fmt: skip
    """Post the experts that a layer's plan leaves to the CPU.

    Args:
        turn: int64 [3], updated: the last number that was posted, this layer's number (0 if nothing is posted), and
            the address of the ring.
        x: [tokens, hidden].
        ids: int [tokens, top_k].
        weights: float32 [tokens, top_k], which multiply the experts' inputs; None if they multiply the outputs.
    """
    on_cpu = (plan.action[0, : int(plan.count)] == Action.CPU).nonzero().flatten()
    if (entry := _next_entry(queue, turn, layer, len(x), len(on_cpu))) is None:
        return
    calls = entry.calls[: len(on_cpu)]
    calls[:, 0], calls[:, 1] = plan.experts[on_cpu], plan.bits[on_cpu, 1]
    calls[:, 2:5] = plan.addresses[0, on_cpu]
    calls[:, 5:] = plan.addresses[-1, on_cpu] if len(plan.addresses) > 1 else 0
    entry.ids[: len(ids)], entry.x[: len(x)] = ids, x
    entry.header[6] = weights is not None
    if weights is not None:
        entry.weights[: len(ids)] = weights
    native_library().post(queue.address, int(turn[0]))


def collect_plain(queue: QueueMemory, turn: Tensor, out: Tensor, computed: Tensor) -> bool:
    """Wait for the answer to what the layer has posted, and copy its rows.

    Args:
        turn: as ``post_plain`` left it.
        out: [tokens * top_k, hidden]; rows of pairs are written whose ``computed`` is 2.
        computed: int32 [tokens, top_k].

    Returns:
        False if the CPU gave up.
    """
    number = int(turn[1])
    if not number:
        return True
    given_up = native_library().wait(queue.address, number)
    pairs = (computed.flatten() == 2).nonzero().flatten()
    out[pairs] = queue.entry(number).out[pairs]
    return not given_up


class Ask(IntEnum):
    """int64 fields of a call of a queue that asks for bytes.

    They are ``calls`` of an entry, whose other fields are unused.
    """

    EXPERT = 0
    CODE = 1  # the version that is computed, LOW or HIGH
    NEEDS = 2  # and 3, for the version or its base slice, and for its residual slice: 1 if it is missing
    ADDRESS = 4  # and 5, for the same two: address in memory, written with the answer; 0 if it could not be read


def ask_plain(queue: QueueMemory, turn: Tensor, layer: int, plan: LayerPlan) -> None:
    """Post the experts of a layer's plan that have to come from the store.

    ``turn`` is as for :func:`post_plain`.
    """
    needs = (plan.action == Action.ADMIT) | (plan.action == Action.STREAM)
    asked = needs[:, : int(plan.count)].any(0).nonzero().flatten()
    if (entry := _next_entry(queue, turn, layer, 0, len(asked))) is None:
        return
    calls = entry.calls[: len(asked)]
    calls[:, Ask.EXPERT], calls[:, Ask.CODE] = plan.experts[asked], plan.precisions[asked]
    calls[:, Ask.NEEDS], calls[:, Ask.NEEDS + 1] = needs[0, asked], needs[-1, asked] if len(needs) > 1 else 0
    native_library().post(queue.address, int(turn[0]))


def take_plain(queue: QueueMemory, turn: Tensor, table: Table, layer: int, plan: LayerPlan) -> None:
    """Wait for the experts that :func:`ask_plain` has asked for.

    Their addresses are written into ``Table.source`` and the plan. An expert that could not be read gets the address of
    any slot, so that the step can run, is not kept, and is recorded in ``Table.unread``, so that the step fails at its
    end.
    """
    number = int(turn[1])
    if not number:
        return
    native_library().wait(queue.address, number)
    entry, host = queue.entry(number), table.on_host()
    columns = host.at(layer)
    needs = (plan.action == Action.ADMIT) | (plan.action == Action.STREAM)
    asked = needs[:, : int(plan.count)].any(0).nonzero().flatten().tolist()
    for item, call in zip(asked, entry.calls.tolist(), strict=False):
        expert, lost = int(plan.experts[item]), False
        for part in range(len(needs)):
            if not needs[part, item]:
                continue
            code, address = part + 1 if host.nested else int(plan.precisions[item]), call[Ask.ADDRESS + part]
            lost |= not address
            some = columns["pool"][code] + host.first_slot[layer, code] * columns["slot_bytes"][code]
            host.source[layer, expert, code] = address or some
            plan.addresses[part, item] = torch.from_numpy(columns["offsets"][code] + host.source[layer, expert, code])
        if lost:
            plan.destinations[:, item] = 0
            host.precision[layer, expert], host.slot[:, layer, expert] = 0, -1
            host.unread[layer] = max(host.unread[layer], expert)


def native_library() -> native.Library:
    """Return the native library, which answers the queue.

    Raises ValueError if it was not built.
    """
    library = native.load()
    if library is None:
        raise ValueError("CPU execution of misses needs the native library, which was not built here")
    return library
