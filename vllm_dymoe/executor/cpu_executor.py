"""The CPU executor: a layer's step in one native call.

The call groups, plans, computes and adds up.

Experts are computed where their bytes are: in a slot, in host memory, or in a file whose pages are in the page cache.
Only a step that needs an expert from disk returns its plan instead; :class:`~.host_planned.HostPlannedLayers` then
fetches the expert.
"""

import ctypes
import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_dymoe.cache.device_cache import DeviceCache
from vllm_dymoe.cache.transfer import TransferError
from vllm_dymoe.experts.format import ExpertFormat, SliceKey
from vllm_dymoe.kernels import Activation, CpuKernel, native
from vllm_dymoe.kernels.base import check_formats
from vllm_dymoe.kernels.native import Outcome
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.routing import Routing, RoutingError
from vllm_dymoe.planner.rule import CPU, HIGH, LOW, Ints
from vllm_dymoe.planner.table import CODES, Table, set_precision
from vllm_dymoe.policies import Policy

FOREVER = np.iinfo(np.int64).max
# Other values of MoeLayer.in_memory_until: not verified yet; to be verified now; found to be on disk; was in memory,
# check again.
_UNVERIFIED, _TO_CHECK, _ON_DISK, _LOOK_AGAIN = 0, -2, -1, 1
_SECONDS = 1.0  # interval after which files in use are looked at again
_KEPT_BYTES = 32 << 20  # scratch that is kept between steps; a larger step frees what it needs beyond that


class CpuExecutor:
    """Runs one rank's layers on a CPU, for one allocation of slots and one policy.

    Args:
        cache: slots and table; the native call updates scores, thresholds and counters in place.
        kernel: the CPU kernel, which has its native library.
        bits: of the LOW and HIGH versions; 0 for a version that is skipped.
        executes: compute misses whose bytes are in memory, as the table's costs say; otherwise fetch them.
        records: write each expert's action into ``Routing.actions``.
        uses: int64 [2, layers, experts], to which uses and squared gates of requests' tokens are added; None to skip
            it.
    """

    def __init__(
        self, cache: DeviceCache, kernel: CpuKernel, policy: Policy, bits: dict[int, int],
        *, executes: bool, uses: Ints | None = None, records: bool = False,
    ) -> None:  # fmt: skip
        library = kernel.library
        assert library is not None
        self._cache, self._kernel, self._library, self._policy = cache, kernel, library, policy
        self._records = records
        table, experts = cache.table, cache.experts
        formats = [{code: of_layer.get(width) for code, width in bits.items()} for of_layer in experts.of_layers]
        set_precision(table, formats, policy.precision.all_critical_counts(experts))
        widths = {code: width for code, width in bits.items() if width}
        in_slots = {CODES[precision]: bits for precision, bits in cache.bits.items()}
        self._slice_bits = widths | in_slots  # of the slices of LOW and HIGH
        self._call = call = native.MoeLayer(executes=executes, evicts=policy.residency.evicts, admits=uses is None)
        call.renormalizes, call.lost_pages = policy.precision.renormalizes, library.lost_pages()
        self._in_memory_until = np.zeros((table.layers, table.experts, 3), np.int64)
        self._writes, self._look_after = list[int](), math.inf  # of mapped files, and when to look at them again
        if executes:
            self._find_sources(table)
            call.in_memory_until = self._in_memory_until.ctypes.data
        thresholds = policy.precision.thresholds or (table.prompt_threshold, table.threshold)
        call.table = native_table(table, *thresholds)
        self._thresholds = thresholds  # keeps the memory that the call uses
        self._uses = uses  # keeps the memory that the call uses
        call.uses = 0 if uses is None else uses.ctypes.data
        self._kinds, self._kind = experts.kinds, experts.kinds[0]
        self._kinds_differ = len(experts.of_kinds) > 1
        self._describe([formats[experts.kinds.index(kind)] for kind in range(len(experts.of_kinds))])
        n = table.experts
        self._experts, self._wanted = np.empty(n, np.int32), np.empty(n, np.int8)
        self._places = np.empty(n * call.table.slices, np.int64)
        call.experts, call.wanted, call.places = (a.ctypes.data for a in (self._experts, self._wanted, self._places))
        self._moe_layer, self._given = library.moe_layer, (ctypes.addressof(call), library.isa, library.parallel)
        self._selects, self._several = not policy.precision.planned, len(policy.precision.precisions) > 1
        self._activation: Activation | None = None
        self._activations = 0  # how often it has changed
        self._scratch: torch.Tensor | None = None
        self._frees_scratch = False  # after the call: it is more than what is kept
        self._pair_rows: torch.Tensor | None = None
        self._ready = np.zeros(table.layers, np.uint8)
        self._step = native.NativeStep(
            ctypes.addressof(call), library.isa, library.parallel, layers=table.layers, ready=self._ready.ctypes.data
        )

    def begin_step(self) -> None:
        """Have slices verified again if their files were written to; looks once a second."""
        if time.monotonic() < self._look_after:
            return
        before, self._writes = self._writes, self._cache.store.writes()
        self._look_after = time.monotonic() + _SECONDS
        for layer, (now, seen) in enumerate(zip(self._writes, before, strict=True)):
            if now != seen:
                self._in_memory_until[layer] = _UNVERIFIED

    def begin_native(self, tokens: int) -> None:
        """Begin a step whose layers run without Python, as far as they are ready.

        Requests' tokens are counted and learnt from. :meth:`end_native` must follow in this thread.

        Args:
            tokens: in the step; a layer with more rows goes to Python.
        """
        self._call.planned = 0
        self._step.tokens, self._step.threads = tokens, torch.get_num_threads()
        self._library.native_step(ctypes.addressof(self._step))

    def end_native(self) -> None:
        self._library.native_step(None)

    def make_ready(self, layer: int, *, on_input: bool) -> None:
        """Let native steps run a layer that :meth:`run` has computed.

        Python has checked the layer's tensors; those of later steps are like them. Nothing happens where layers differ
        in formats or activations, which Python sets in the call, or where Python chooses precisions or records actions.

        Args:
            on_input: the router's weights multiply the experts' inputs.
        """
        if self._activations == 1 and not (self._kinds_differ or self._selects or self._records):
            self._ready[layer] = 1 + on_input

    def _find_sources(self, table: Table) -> None:
        """Write the addresses of every expert's slices into the table.

        Bytes in files are verified before their first use.
        """
        store = self._cache.store
        for layer, expert in np.ndindex(table.layers, table.experts):
            for code, bits in self._slice_bits.items():
                table.source[layer, expert, code] = store.packed(SliceKey(layer, expert, bits)).data_ptr()
        self._in_memory_until[:] = FOREVER if store.whole else _UNVERIFIED
        if not store.whole:  # mappings must stay open while the call has their addresses
            self._call.lost_pages = store.lost_before
            first = next(iter(self._slice_bits.values()))
            self._mapped = [store.packed(SliceKey(layer, 0, first)) for layer in range(table.layers)]
            self._writes, self._look_after = store.writes(), time.monotonic() + _SECONDS

    def _describe(self, formats: Sequence[dict[int, ExpertFormat | None]]) -> None:
        """Tell the call how experts are packed, of each kind of layers."""
        call = self._call
        used = [(code, fmt) for of_kind in formats for code, fmt in of_kind.items() if fmt is not None]
        matrices = [matrix for _, fmt in used for matrix in fmt.matrices]
        described = [native.matrix(matrix) for matrix in matrices]
        self._matrices = (native.Matrix * len(described))(*described)
        self._formats, self._any = [fmt for _, fmt in used], used[0][1]
        self._each = len(used) // len(formats)  # versions of a layer
        for number, (code, _) in enumerate(used[: self._each]):
            call.form[code] = number
        self._use(0)
        columns = max(max(matrix.padded_columns, matrix.columns, matrix.rows) for matrix in matrices)
        layer, fmt = call.kernel, self._any
        layer.hidden, layer.inter, layer.dtype = fmt.hidden, fmt.intermediate, fmt.dtype is torch.float16
        layer.width = -(-columns // 256) * 256
        floats = [matrix.code in native.FLOATS for matrix in described]
        layer.floats = any(floats)
        layer.outer, layer.inner = fmt.matrices[1].rotation, fmt.matrices[2].rotation
        layer.matrices, layer.digits = (
            ctypes.addressof(self._matrices),
            0 if all(floats) else self._kernel.activations // 8,
        )
        self._row_floats = self._library.row_floats(layer.width)
        call.piece_positions = self._kernel.most_positions(self._row_floats)

    def _use(self, layer: int) -> None:
        """Point the call to the formats and slots of a layer's kind.

        Layers of one kind have the same.
        """
        call, experts, table, kind = self._call, self._cache.experts, self._cache.table, self._kinds[layer]
        for code, bits in self._slice_bits.items():
            call.slice_bytes[code] = experts.of_kinds[kind][bits].nbytes
        for code in range(len(call.form)):
            call.form[code] += self._each * (kind - self._kind)
        for name in ("bits", "offsets", "pool", "slot_bytes"):
            setattr(call.table, name, getattr(table, name)[layer].ctypes.data)
        self._kind = kind

    def run(self, routing: Routing, activation: Activation, *, observed: bool = True) -> torch.Tensor | LayerPlan:
        """Compute one layer, or return its plan if an expert must come from disk first.

        Returns:
            [tokens, hidden] like x, or the layer's plan.

        Raises:
            TypeError, ValueError: the tensors do not fit the experts.
            RoutingError: the model does not have an expert that the routing names.
            TransferError: a page of a mapped file could not be read.
        """
        x, ids, weights, on_input = routing.x, routing.ids, routing.weights, routing.weights_on_input
        if activation is not self._activation:
            self._check(x, activation)
        if not (x.is_contiguous() and ids.is_contiguous() and weights.is_contiguous()):
            x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        if self._kinds[routing.layer] != self._kind:
            self._use(routing.layer)
        marks = versions = actions = None  # objects that the call reads or writes
        if (prompt := routing.prompt) is not None:
            marks = prompt.rows.to(torch.int8).add_(prompt.rows & prompt.heavy)
        # The native call knows this rank's experts only, but ranks must choose precisions among those of all ranks.
        if self._selects or (routing.global_ids is not None and self._several):
            versions = self._selected(routing)
        if self._records:
            routing.actions = actions = torch.empty(ids.shape, dtype=torch.uint8)
        into, (tokens, top_k) = torch.empty_like(x), ids.shape
        self._call.route(
            routing.layer, tokens, top_k, ids.dtype is torch.int64, ids.data_ptr(), weights.data_ptr(), x.data_ptr(),
            into.data_ptr(),
            0 if marks is None else marks.data_ptr(),
            0 if actions is None else actions.data_ptr(),
            0 if versions is None else versions.ctypes.data,
            observed, on_input, torch.get_num_threads(),
        )  # fmt: skip
        if self._call.planned:  # by the operator, in this step
            self._call.planned, outcome = 0, Outcome.FETCH
        else:
            outcome = self._moe_layer(*self._given)
        while outcome and outcome != Outcome.FETCH:  # DONE is 0
            if outcome == Outcome.BAD_ROOM:
                self._grow(tokens * (top_k if on_input else 1), tokens * top_k)
            elif outcome == Outcome.VERIFY:
                self._verify(routing.layer)
            elif outcome == Outcome.BAD_EXPERT:
                raise RoutingError(routing.layer, int(self._call.bad_expert), len(self._experts))
            else:
                break
            outcome = self._moe_layer(*self._given)
        if self._frees_scratch:
            self.release_scratch()
        if not outcome:
            return into
        if outcome == Outcome.FETCH:
            decided = self._decided()
            return LayerPlan.on_host(routing.grouped, *decided, row_for_each_pair=routing.weights_on_input)
        if outcome == Outcome.LOST and (sentence := self._lost(routing.layer)):
            raise TransferError(sentence)
        return into

    def release_scratch(self) -> None:
        """Free the scratch that is kept between steps.

        The next step allocates what it needs.
        """
        self._scratch = self._pair_rows = None
        self._frees_scratch = False
        self._call.scratch_floats = self._call.pair_capacity = 0

    def _decided(self) -> tuple[Ints, NDArray[np.int8], Ints]:
        """Return the call's decisions: experts, versions and places.

        They are what :meth:`LayerPlan.on_host` takes.
        """
        n, slices = int(self._call.count), int(self._call.table.slices)
        places = self._places[: slices * n].reshape(slices, n).copy()
        return self._experts[:n].astype(np.int64), self._wanted[:n].copy(), places

    def _parts(self, version: int) -> tuple[int, ...]:
        return (LOW, HIGH)[:version] if self._call.table.slices == 2 else (version,)

    def _lost(self, layer: int) -> str:
        """Return why pages of mapped experts could not be read.

        The text is empty if the lost pages were another store's.
        """
        experts, versions, places = self._decided()
        executed = (places == CPU).any(0)
        wanted = zip(experts[executed].tolist(), versions[executed].tolist(), strict=True)
        return self._cache.store.lost(
            SliceKey(layer, expert, self._slice_bits[part])
            for expert, version in wanted
            for part in self._parts(version)
        )

    def _verify(self, layer: int) -> None:
        """Verify slices that the call asked about, by checksum.

        Slices that are not in the page cache are marked as on disk instead.
        """
        until, store = self._in_memory_until[layer], self._cache.store
        for expert, code in np.argwhere(until == _TO_CHECK).tolist():
            found = store.in_memory(SliceKey(layer, expert, self._slice_bits[code]))
            until[expert, code] = _LOOK_AGAIN if found else _ON_DISK

    def _selected(self, routing: Routing) -> NDArray[np.int8]:
        """Return the version that the policy chose for each expert, int8 [experts]."""
        versions = np.zeros(len(self._experts), np.int8)
        for expert, precision in self._policy.precision.select(routing).items():
            versions[expert] = CODES[precision]
        return versions

    def _check(self, x: torch.Tensor, activation: Activation) -> None:
        """Check a layer's tensors against the experts' formats.

        Also set the layer's activation in the call.
        """
        for fmt in self._formats:
            check_formats(*fmt.matrices, x, activation)
        native.set_activation(self._call.kernel, activation)
        self._activation = activation
        self._activations += 1
        if self._activations > 1:
            self._ready[:] = 0

    def _grow(self, inputs: int, positions: int) -> None:
        """Allocate scratch for a step.

        Args:
            inputs: number of input rows.
            positions: number of (token, expert) pairs.
        """
        call = self._call
        floats = self._row_floats * (inputs + min(positions, call.piece_positions))
        self._scratch = self._kernel.scratch(floats)
        self._frees_scratch = self._scratch.nbytes > _KEPT_BYTES
        self._pair_rows = torch.empty(positions, self._any.hidden, dtype=self._any.dtype)
        call.scratch, call.scratch_floats = self._scratch.data_ptr(), self._scratch.numel()
        call.pair_rows, call.pair_capacity = self._pair_rows.data_ptr(), positions


def native_table(table: Table, prompt_threshold: Ints, threshold: Ints) -> native.CacheTable:
    """Return the addresses of a table's columns and of the thresholds.

    The table and the thresholds must outlive the result.
    """
    columns = {
        "held": table.precision, "slot": table.slot, "score": table.score, "used_at": table.used_at, "step": table.step,
        "quotas": table.quotas, "reuse_high": table.reuse_high, "counters": table.counters, "critical": table.critical,
        "prompt_threshold": prompt_threshold, "threshold": threshold, "cpu_costs": table.cpu_costs, "bits": table.bits,
        "offsets": table.offsets, "pool": table.pool, "slot_bytes": table.slot_bytes, "source": table.source,
    }  # fmt: skip
    assert all(column.flags.c_contiguous for column in columns.values())
    addresses = {name: column.ctypes.data for name, column in columns.items()}
    return native.CacheTable(table.layers, table.experts, len(table.slot), **addresses)
