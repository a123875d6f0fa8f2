"""The expert server of one rank.

It holds budget, cache and executors of all MoE layers, and changes them between steps.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm_dymoe.cache.budget import (
    SlotPlan,
    check_in_host_memory,
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    precision_bits,
    slot_bits,
    workspace_bytes,
)
from vllm_dymoe.cache.device_cache import Budget, DeviceCache, SlotPools, Writer, check_cache
from vllm_dymoe.cache.device_memory import make_device_memory
from vllm_dymoe.cache.device_table import DeviceCounts, DeviceTable, DeviceWaits
from vllm_dymoe.cache.expert_cache import Fetcher
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.migration import Agree, Migration
from vllm_dymoe.cache.pages import whole_pages
from vllm_dymoe.cache.store import FileStore, HostStore, StoreError
from vllm_dymoe.cache.store.memory import host_memory_bytes
from vllm_dymoe.cache.store.pinning import CudaPinner
from vllm_dymoe.cache.transfer import TransferEngine, make_engine
from vllm_dymoe.executor.copy_branch import Branch, make_branch
from vllm_dymoe.executor.cpu_execution import CpuExecution
from vllm_dymoe.executor.cpu_executor import CpuExecutor
from vllm_dymoe.executor.cpu_worker import longest_wait
from vllm_dymoe.executor.disk_queue import DiskQueue
from vllm_dymoe.executor.host_planned import HostPlannedLayers, StepCounts
from vllm_dymoe.executor.plain_kernels import PlainKernels
from vllm_dymoe.executor.rates import link_rate
from vllm_dymoe.executor.small_batch import SmallBatches, SmallBatchKernel, StepMemory
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.kernels import CpuKernel, Decode, Grouped, make_kernel
from vllm_dymoe.options import ConfigError, ExpertBudget, Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS, check_experts
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.table import CODES
from vllm_dymoe.policies import Policy, make_policy
from vllm_dymoe.prefetch import Measured, Predictor, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.pace import StepPace
from vllm_dymoe.server.precision import changed_precision
from vllm_dymoe.server.stats import ServerStats

if TYPE_CHECKING:
    from vllm_dymoe.kernels.triton import TritonKernel


class Parts:
    """The device-specific parts of a server."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_memory = device, make_device_memory(device)
        self._pinned: list[weakref.finalize[[int], torch.Tensor]] = []

    def pools(self, plan: SlotPlan, experts: ModelExperts, bits: Mapping[Precision, int]) -> SlotPools:
        return SlotPools(plan, experts, bits, self.device, self.device_memory)

    def decode_kernel(
        self, kernel: "CpuKernel | TritonKernel", experts: ModelExperts, link_gbps: float | None = None
    ) -> SmallBatchKernel:
        """Return what plans and computes decode steps without the host.

        Args:
            link_gbps: rate in GB/s of an emulated link; None without one.

        Raises:
            ValueError: the kernel cannot.
        """
        if isinstance(kernel, CpuKernel):
            return PlainKernels(kernel, experts.of_layers, link_gbps)
        # Importing triton takes a second, and only a GPU needs it.
        from vllm_dymoe.executor.triton_kernels import TritonKernels

        return TritonKernels(kernel, experts, SMALL_BATCH_ROWS)

    def pin(self, memory: torch.Tensor) -> str | None:
        """Pin memory for the device, until :meth:`unpin` or the tensor's end.

        Returns:
            the reason why that failed, or None.
        """
        if self.device.type == "cpu":
            return None
        pinner, address = CudaPinner(self.device), memory.data_ptr()
        reason = pinner.pin(address, whole_pages(memory.numel()))
        if reason is None:
            self._pinned.append(weakref.finalize(memory, pinner.unpin, address))
            self._pinned[-1].atexit = False  # at exit, the operating system does this
        return reason

    def unpin(self) -> None:
        """Unpin all memory; otherwise what is mapped there later could not be pinned."""
        while self._pinned:
            self._pinned.pop()()

    def branch(self) -> Branch:
        return make_branch(self.device)


@dataclass(frozen=True)
class _Spending:
    """What a slot plan depends on, in addition to options and policy."""

    experts: ModelExperts  # experts of this rank
    filled: bool  # slots for every expert are filled at start
    automatic: int  # bytes to use if the budget is automatic

    def plan(self, budget: ExpertBudget | int, options: Options, policy: Policy, overhead: int) -> SlotPlan:
        """Return the slot plan of a budget, or of a limit in bytes.

        Args:
            overhead: bytes of the budget that are not for slots.

        Raises:
            ConfigError: as for ``plan_slots``.
        """
        if isinstance(budget, ExpertBudget):
            budget = limit_in_bytes(budget, self.experts, options, overhead, self.automatic)
        return plan_slots(self.experts, options, policy, budget, overhead, filled=self.filled)


@dataclass(frozen=True, eq=False)
class _DevicePlanning:
    """Objects of device-planned steps.

    They live as long as the server, because captured graphs use them.
    """

    table: DeviceTable
    memory: StepMemory
    kernel: SmallBatchKernel
    branch: Branch
    counts: DeviceCounts | None  # counts of routers' choices; None unless versions move between steps


@dataclass(frozen=True, eq=False)
class _Serving:
    """The objects that serve one allocation of slots and one policy.

    They are replaced as a whole.
    """

    options: Options
    cache: DeviceCache
    layers: HostPlannedLayers
    small_batches: SmallBatches | None  # None on a plain CPU


class ExpertServer:
    """Every MoE layer of one model on one rank.

    A plain CPU plans and computes each layer in one native call. Elsewhere the device plans.

    A resize, a change of precision and a wake-up each build a new ``_Serving`` between two steps, and swap it in.
    ConfigError if the budget cannot hold one expert of each precision in use, or if the device cannot plan.

    Args:
        agree: exchanges values with ranks that have other parts of the same experts, for policies that move versions.
        all_experts: experts of a layer on all ranks, as routers number them, if this rank has some of them; 0 if it has
            all.
        around: MoE layers of a pipeline before this stage and after it.
        predictor: predicts experts, or a function that makes the predictor when one is needed. The function is told
            whether the device asks, because captured graphs cannot be given another predictor.
        rates: file that stores the rates of link and CPU; None to measure them every time.
        on_late: called with a message if the CPU has not answered the device in time.
        training_bytes: device memory for training a predictor, part of the budget.
        predictor_room: device memory for the trained predictor, part of the budget.
        machine_ranks: ranks of this machine, which share its cores.
    """

    def __init__(
        self,
        store: HostStore,
        options: Options,
        device: torch.device,
        automatic_budget: int = 0,  # bytes to use if ``options.expert_budget`` is automatic
        policy: Policy | None = None,  # replaces the policy that the options name
        engine: TransferEngine | None = None,  # replaces the engine for the device
        predictor: Predictor | Callable[[bool], Predictor | None] | None = None,
        *,
        agree: Agree = list,
        all_experts: int = 0,
        around: tuple[int, int] = (0, 0),
        parts: Parts | None = None,  # replaces the device's parts
        rates: Path | None = None,
        on_late: Callable[[str], None] = lambda sentence: None,
        training_bytes: int = 0,
        predictor_room: int = 0,
        machine_ranks: int = 1,
        decode: Decode = Decode.PLAIN,  # another way only if a self-test has found it right on this device
        grouped: Grouped = Grouped.PLAIN,  # likewise
    ) -> None:
        self.store, self.experts, self.device = store, store.experts, device
        on_cpu = options.plain_cpu(device.type)
        # A native call would not show what it reads and writes to parts that record this.
        self._plain_cpu = on_cpu and engine is None and parts is None
        self._parts = parts = parts or Parts(device)
        formats, policy = self.experts.all_formats, policy or make_policy(options).of_stage(*around)
        try:
            workspace = workspace_bytes(self.experts, device.type)
            self.kernel = make_kernel(device, workspace, options.activations, decode=decode, grouped=grouped)
        except ValueError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error
        largest, timeout = max(fmt.nbytes for fmt in formats), options.transfer_timeout_s or None
        self.engine = engine or make_engine(store, device, largest, timeout, options.link_gbps)
        _check_misses(options, store, on_cpu=on_cpu)
        decoding: SmallBatchKernel | None = None
        self.disk_queue: DiskQueue | None = None
        watched = parts.device_memory.ends_long_kernels()
        if not on_cpu:
            all_experts = all_experts if policy.precision.by_importance else 0
            decoding = _make_decode_kernel(parts, self.kernel, self.experts, options, policy, all_experts)
        if decoding is not None and not store.readable:
            waits = longest_wait(options.transfer_timeout_s, ends_long_kernels=watched) or None
            self.disk_queue = _make_disk_queue(store, waits, device, parts.pin)
            decoding = decoding.with_disk(self.disk_queue)
        execution = options, store, self.engine, device, parts.pin, on_late, rates
        self.cpu_execution = CpuExecution(*execution, ends_long_kernels=watched, ranks=machine_ranks)
        self.unasked = ""
        """Why no predictor is asked; empty if one is where the policy has one."""
        if self._plain_cpu and self.engine.occupies_cores:
            self.unasked = "the cores that would copy compute"
        asked = None if self.unasked else predictor(decoding is not None) if callable(predictor) else predictor
        if decoding is not None and asked is None and predictor is None:
            asked = _untrained_predictor(policy, self.experts)
        self.predictor: Measured | None = None if asked is None else Measured(asked)
        self._training_bytes, self._predictor_room = training_bytes, predictor_room
        self._on_device: _DevicePlanning | None = None
        if decoding is not None:
            side = DeviceTable(store, device, all_experts)
            names = None if asked is None else asked.on_device(side.table, self.experts)
            records = options.trace is not None
            memory = StepMemory(self.experts, side.table, device, recorded=records, predictor=names)
            self._judged = np.zeros(tuple(memory.listed.counts.shape), np.int64)  # counts of predictions, as taken
            counts = None if policy.residency.migrating is None else DeviceCounts(side.table)
            self._on_device = _DevicePlanning(side, memory, decoding, parts.branch(), counts)
        self.host_cache = store if isinstance(store, HostCache) and not store.whole else None
        files = self.host_cache.files if self.host_cache else store
        self._step_counts = StepCounts(disk=files.counts) if isinstance(files, FileStore) else StepCounts()
        self._agree, self._around = agree, around
        self._link_rate = _known_rate(options, device)
        self.asleep = 0  # sleep level; 0 while awake
        self._spending = _Spending(self.experts, decoding is not None, automatic_budget)
        plan = self._spending.plan(options.expert_budget, options, policy, self.overhead)
        self._serving = self._allocate(options, policy, plan)

    # -- what can change between two steps --------------------------------------------------------

    def check_budgets(self, expert_budget: Any = None, host_memory: Any = None) -> None:
        """Raise ConfigError if a change of these budgets would be refused.

        Both stay as they are. None stands for a budget that will not change. On a CPU both limit the same memory.
        """
        in_host_memory = self._budget_is_host_memory
        host = None if host_memory is None or in_host_memory else self._host_bytes(host_memory)
        budgets = (host_memory if in_host_memory else None), expert_budget
        plans = [self._plan(budget) for budget in budgets if budget is not None]
        if len(plans) == 2:
            check_in_host_memory(plans[1].limit, plans[0].limit)
        self._check_awake("a change of budgets")  # stops moves, on all ranks that agree on them or on none
        for plan in plans:
            self._check_growth(self.options, self.policy, plan)
        if host is not None:
            host_cache, nbytes = host
            with _host_memory_errors():
                host_cache.check_resize(nbytes)

    def resize(self, budget: Any) -> None:
        """Change the expert budget, given as for the option.

        The cache starts empty and freed memory returns to the device.

        On a ValueError the old budget stays: the value is invalid, cannot hold one expert of each precision, exceeds
        the device's memory, is automatic for a number of requests that the start did not know, or a read that was given
        up has not ended yet. If the new slots could not be filled and the old ones cannot be either, the message says
        so, and every step fails until a resize succeeds.
        """
        self._replace("expert_budget", self.options, self.policy, self._plan(budget))

    def _plan(self, budget: Any) -> SlotPlan:
        """Return the slot plan of another expert budget, given as for the option."""
        parsed, at_start = ExpertBudget.parse(budget), self.options.expert_budget.requests
        if parsed.requests not in (1, at_start):
            raise ConfigError(
                f'vllm-dymoe: vLLM has sized its KV cache, so "auto" is what the start left for experts; give a number '
                f"of bytes, or start with expert_budget auto for {parsed.requests} requests.",
                option="expert_budget",
            )
        return self._spending.plan(parsed, self.options, self.policy, self.overhead)

    def resize_host_memory(self, wanted: Any) -> None:
        """Change the budget of host memory, given as for the option.

        The tier starts empty. On a CPU this changes the expert budget. On a ValueError the old budget stays: there is
        no such tier, or the value is too small or too large.
        """
        if self._budget_is_host_memory:
            return self.resize(wanted)
        host_cache, nbytes = self._host_bytes(wanted)
        self._check_awake("a change of host_memory")
        with _host_memory_errors():
            host_cache.resize(nbytes)

    @property
    def _budget_is_host_memory(self) -> bool:
        return self.host_cache is None and self.options.plain_cpu(self.device.type)

    def _host_bytes(self, wanted: Any) -> tuple[HostCache, int]:
        """Return the tier of host memory, and the bytes of its wanted budget."""
        nbytes = host_memory_bytes(ExpertBudget.parse(wanted), self.experts)
        why = "give a number of bytes" if self.host_cache else f"experts are in {self.store.description}"
        if self.host_cache is None or nbytes is None:
            raise ConfigError(f"vllm-dymoe: host_memory stays as it was: {why}.", option="host_memory")
        return self.host_cache, nbytes

    def set_precision(self, /, **changes: Any) -> None:
        """Change retention, precisions or another parameter of the policy.

        See :func:`~.precision.changed_precision` for what can change. The budget stays. If its slots have to be
        divided in another way, the cache starts empty. On a ConfigError nothing changes: a value is invalid, or a read
        that was given up has not ended yet.
        """
        options, policy, plan = self._with_precision(changes)
        if self._has_slots_of(options, policy, plan):
            self.serve(options, policy)
        else:
            self._replace("precision", options, policy, plan)

    def check_precision(self, /, **changes: Any) -> None:
        """Raise ConfigError if :meth:`set_precision` would; nothing changes."""
        if not self._has_slots_of(*self._with_precision(changes)):
            self._check_awake("a change of precision")

    def _with_precision(self, changes: Mapping[str, Any]) -> tuple[Options, Policy, SlotPlan]:
        options = changed_precision(self.options, self.experts.formats, changes)
        policy = make_policy(options).of_stage(*self._around)
        return options, policy, self._spending.plan(self.slot_plan.limit, options, policy, self.overhead)

    def _has_slots_of(self, options: Options, policy: Policy, plan: SlotPlan) -> bool:
        bits = slot_bits(self.experts, options, policy.precision.precisions)
        return plan == self.slot_plan and bits == self.cache.bits

    @property
    def ranks_add_up(self) -> bool:
        """Whether precisions depend on the traffic of several ranks.

        These ranks have parts of the same experts.
        """
        return self._agree is not list and len(self.policy.precision.precisions) > 1

    def start_over(self) -> None:
        """Empty the cache and forget scores, thresholds and hotness.

        Ranks with parts of the same experts do this together after a step that one of them could not compute.
        """
        policy = make_policy(self.options).of_stage(*self._around)
        self._replace("state", self.options, policy, self.slot_plan, forgets=True)

    def drop_predictor(self) -> None:
        """Stop all predictions."""
        self.predictor = None
        self.serve(self.options, self.policy)

    def use_predictor(self, predictor: Predictor) -> None:
        """Use another predictor from the next step on, if predictions are used.

        It must fit into ``predictor_room``.
        """
        assert self._on_device is None, "captured graphs ask the predictor that was there from the start"
        if not self.unasked:
            self.predictor = Measured(predictor, self.predictor)
            self.serve(self.options, self.policy)

    def sleep(self, level: int) -> None:
        """Free the slots' memory until ``wake``.

        From level 2 on, the host memory of the experts is freed, too. Background work may continue. On a ConfigError
        nothing changes: a read that was given up has not ended yet.
        """
        self._check_awake("falling asleep")
        if level > 1 and isinstance(self.store, HostCache):
            try:
                self.store.sleep()
            except StoreError as error:
                raise ConfigError(f"vllm-dymoe: {error}.") from error
            self.cache.forget_views()
        self.asleep = level
        self.cache.pools.free()

    def wake(self) -> None:
        """Allocate slots again; they are empty, unless every expert has a slot.

        ConfigError if there is no memory, StoreError if the experts cannot be read; then the server stays asleep.
        """
        if self.asleep > 1 and isinstance(self.store, HostCache):
            self.store.wake()
            self.asleep = 1
        if self.asleep:
            self._take_decode_counts()
            self._serving = self._allocate(self.options, self.policy, self.slot_plan, self._serving)
            self.asleep = 0

    def _check_awake(self, what: str) -> None:
        """Raise ConfigError if slots cannot be freed now.

        They may have been freed already, or an abandoned read may still write into one.
        """
        if self.asleep:
            raise ConfigError(f"vllm-dymoe: {what} is impossible while the engine sleeps; wake it up first.")
        if self.small_batches is not None:
            self.small_batches.settle()  # its copies write into slots
        self._release_disk()
        if not self.host_planned.end():
            raise ConfigError(
                f"vllm-dymoe: {what} is impossible while reads that were given up have not ended "
                f"({self.store.description}); try again later."
            )

    def _check_growth(self, options: Options, policy: Policy, plan: SlotPlan) -> None:
        """Raise ConfigError if the slots of another plan do not fit."""
        bits = slot_bits(self.experts, options, policy.precision.precisions)
        self.cache.pools.check_growth(plan, self.slot_plan, plan.slots_nbytes(self.experts, bits))

    def _release_disk(self) -> None:
        """Give back the host memory that the last layer of a device-planned step was lent."""
        if self.disk_queue is not None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.disk_queue.release()

    def _replace(self, what: str, options: Options, policy: Policy, plan: SlotPlan, *, forgets: bool = False) -> None:
        """Replace the slots; hotness is kept unless ``forgets``.

        The old slots are freed first, so that only one arena exists at a time. ConfigError if they cannot be freed now,
        or if the new ones cannot be filled; the server then continues with as many slots as before. If these cannot be
        filled either, there are none (:attr:`no_slots`) until another call succeeds.
        """
        self._check_awake(f"a change of {what}")
        self._check_growth(options, policy, plan)
        self._take_decode_counts()  # from the table that is replaced, at the bits that it had
        before = self._serving
        before.cache.pools.free()
        try:
            self._serving = self._allocate(options, policy, plan, None if forgets else before)
        except ConfigError as error:
            try:
                self._serving = self._allocate(before.options, before.layers.policy, before.cache.slot_plan, before)
            except ConfigError as again:
                raise ConfigError(
                    f"{error} The slots before it cannot be allocated again either, so every request fails until "
                    "expert_budget is set again.",
                    option=error.option,
                ) from again
            raise

    def _allocate(self, options: Options, policy: Policy, plan: SlotPlan, before: _Serving | None = None) -> _Serving:
        """Return the objects that serve a plan, after ``before`` has freed its slots.

        Raises ConfigError if memory is short.
        """
        bits, migrating = slot_bits(self.experts, options, policy.precision.precisions), policy.residency.migrating
        pools = self._parts.pools(plan, self.experts, bits)
        try:
            writer, device_table = Writer.HOST, None
            if self._on_device is not None:
                writer = Writer.DEVICE if migrating is None else Writer.PLANNER
                device_table = self._on_device.table
            reuse_high = policy.precision.reuses_high
            cache = DeviceCache(self.store, plan, pools, device_table, writer, reuse_high=reuse_high)
            fetcher = Fetcher(cache, self.engine)
            migration = None
            if migrating is not None:
                counts = None if self._on_device is None else self._on_device.counts
                if counts is not None:
                    counts.clear()
                known = before.layers.migration.hotness if before is not None and before.layers.migration else None
                known = known if known is not None and known.any() else None
                migration = Migration(fetcher, migrating, known, self._agree, counts)
            return self._make_serving(options, policy, cache, fetcher, migration)
        except ConfigError:
            pools.free()
            raise

    def serve(self, options: Options, policy: Policy) -> None:
        """Serve with other options and another policy, in the existing slots."""
        self._take_decode_counts()
        layers = self.host_planned
        layers.settle()
        if self.small_batches is not None:
            self.small_batches.settle()
        self._serving = self._make_serving(options, policy, self.cache, layers.fetcher, layers.migration)

    def _make_serving(
        self, options: Options, policy: Policy, cache: DeviceCache, fetcher: Fetcher[DeviceCache],
        migration: Migration | None,
    ) -> _Serving:  # fmt: skip
        """Build the objects that run the steps.

        Costs and precisions are written into the tables first.
        """
        table, records = cache.table, options.trace is not None
        policy.precision.begin(self.experts.curves)
        bits = {precision: precision_bits(options, precision) for precision in Precision}
        costs = self.cpu_execution.costs(bits)
        table.cpu_costs[:], table.reuse_high[:] = costs, policy.precision.reuses_high
        table.evicts[:], table.admits[:] = policy.residency.evicts, migration is None
        small_batches = None
        if (on_device := self._on_device) is not None:
            on_device.table.serve(policy, bits, cache.bits)
            if self.disk_queue is not None:
                versions = cache.bits if table.nested else bits
                self.disk_queue.serve({CODES[precision]: width for precision, width in versions.items()})
            on_device.table.table.cpu_costs.copy_(torch.from_numpy(costs))
            # Recorded actions cover whole steps, so these are not split. With migration the staging slots are for
            # moves.
            shares = len(policy.precision.precisions) == 1 and migration is None and not records
            prefetch, predictor = policy.prefetch, self.predictor
            if predictor is not None:
                predictor.predictor.slots_changed()
            small_batches = SmallBatches(
                on_device.memory,
                on_device.kernel,
                on_device.branch,
                cache.quotas,
                cache.staging if migration is None else dict.fromkeys(cache.staging, 0),
                spare=cache.staging if migration is not None else {},
                cpu_queue=self.cpu_execution.worker,
                costs=costs if shares and costs.any() else None,
                count=None if on_device.counts is None else on_device.counts.add_layer,
                projections=0 if predictor is None or prefetch is None else prefetch.projections,
                pace=StepPace() if prefetch is not None and prefetch.paced else None,
                foresees=self.disk_queue is None,
                overlaps=policy.residency.overlaps,
            )
        layers = HostPlannedLayers(
            fetcher,
            self.kernel if isinstance(self.kernel, CpuKernel) else None,
            policy,
            bits,
            self.predictor if on_device is None else None,
            self._step_counts,
            executes_in_place=bool(costs.any()),
            cpu=self._make_cpu_executor(cache, policy, bits, migration, executes=bool(costs.any()), records=records),
            migration=migration,
            records_actions=records,
            agree=self._agree,
            device_waits=self._device_waits(policy, bits),
        )
        return _Serving(options, cache, layers, small_batches)

    def _device_waits(self, policy: Policy, bits: Mapping[Precision, int]) -> DeviceWaits | None:
        """Return what device-planned steps have waited for the link.

        None if the policy does not follow that.
        """
        if self._on_device is None or policy.precision.link_share is None:
            return None
        if self._link_rate is None:
            self._link_rate = link_rate(self.store, self.device)
        seconds = {}
        for precision, width in bits.items():  # of the largest layer
            sizes = [of_layer[width].nbytes for of_layer in self.experts.of_layers if width in of_layer]
            seconds[CODES[precision]] = max(sizes, default=0) / self._link_rate
        return DeviceWaits(self._on_device.table.table, seconds)

    def _make_cpu_executor(
        self, cache: DeviceCache, policy: Policy, bits: Mapping[Precision, int], migration: Migration | None,
        *, executes: bool, records: bool,
    ) -> CpuExecutor | None:  # fmt: skip
        """Return the CPU executor, or None.

        None with a device, and without the native library.
        """
        kernel = self.kernel
        if not (self._plain_cpu and isinstance(kernel, CpuKernel) and kernel.library):
            return None
        served = {CODES[precision]: bits[precision] for precision in (Precision.LOW, Precision.HIGH)}
        if Precision.HIGH not in cache.bits:
            served[CODES[Precision.HIGH]] = 0
        uses = None if migration is None else migration.uses
        return CpuExecutor(cache, kernel, policy, served, executes=executes, uses=uses, records=records)

    # -- inspection --------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """The options in force."""
        return self._serving.options

    @property
    def policy(self) -> Policy:
        return self._serving.layers.policy

    @property
    def cache(self) -> DeviceCache:
        return self._serving.cache

    @property
    def slot_plan(self) -> SlotPlan:
        return self._serving.cache.slot_plan

    @property
    def budget(self) -> Budget:
        return self._serving.cache.budget

    @property
    def no_slots(self) -> str:
        """Why there are no slots, so that no step can run; empty if there are."""
        if self.cache.pools:
            return ""
        if self.asleep:
            return "vllm-dymoe: the engine sleeps and has no slots for experts; wake it up first."
        return (
            "vllm-dymoe: there are no slots for experts, because a change failed and the slots before it could not be "
            "allocated again; set expert_budget again."
        )

    @property
    def host_planned(self) -> HostPlannedLayers:
        return self._serving.layers

    @property
    def small_batches(self) -> SmallBatches | None:
        return self._serving.small_batches

    @property
    def asks_trained(self) -> bool:
        """Whether a trained predictor is in use."""
        return self.predictor is not None and isinstance(self.predictor.predictor, TrainedPredictor)

    @property
    def overhead(self) -> int:
        """Bytes of the budget that are not for slots.

        They are for the kernel's workspace, the predictor and its training, and device-side tables.
        """
        predictor = max(self._predictor_room, self.predictor_bytes)
        on_device, cpu_queue = self._on_device, self.cpu_execution.worker
        decides = 0 if on_device is None else on_device.memory.nbytes + (0 if cpu_queue is None else cpu_queue.nbytes)
        decides += 0 if self.disk_queue is None else self.disk_queue.nbytes
        return self.kernel.workspace_bytes + predictor + self._training_bytes + decides

    @property
    def predictor_bytes(self) -> int:
        """Bytes of the budget that the predictor takes."""
        if self._on_device is not None:
            names = self._on_device.memory.predictor
            return 0 if names is None else names.nbytes
        return 0 if self.predictor is None else self.predictor.nbytes

    @property
    def minimum_budget(self) -> int:
        return minimum_budget(self.experts, self.options, self.policy, self.overhead)

    def stats(self) -> ServerStats:
        self._take_decode_counts()
        prefetcher, small_batches = self.host_planned.prefetcher, self.small_batches
        intervals = prefetcher.intervals if prefetcher else {}
        if small_batches is not None and small_batches.prefetch is not None and small_batches.prefetch.pace is not None:
            intervals = {Phase.DECODE.value: small_batches.prefetch.pace.interval}
        found = self.host_planned, self.host_cache, self.predictor, self.predictor_bytes
        return ServerStats.collect(*found, intervals)

    def _take_decode_counts(self) -> None:
        if self.host_planned.cpu is not None:
            self._step_counts.residency.take(self.cache.table.counters)
        if self.cache.device_table is not None:
            self.cache.read_device()
            counts = self._step_counts
            self.cache.device_table.take_counts(counts.residency, self.engine.stats, counts.prefetch)
        if self._on_device is not None and self.predictor is not None:
            counted = self._on_device.memory.listed.counts.cpu().numpy().copy()
            self.predictor.stats.add(*(counted - self._judged).sum(0).tolist())
            self._judged = counted

    def reset_stats(self) -> None:
        self._take_decode_counts()
        if self.predictor is not None:
            self.predictor.reset_stats()
        self.host_planned.reset_stats()
        if self.host_cache is not None:
            self.host_cache.reset_stats()

    def close(self, *, keep_store: bool = False) -> None:
        """Stop the transfer threads, free the slots' memory, and close the store.

        The store stays open if another server uses it.
        """
        if self.small_batches is not None:
            self.small_batches.settle()
        if self.disk_queue is not None:
            self._release_disk()
            self.disk_queue.close()
        self.engine.close()
        self.cpu_execution.close()
        self._parts.unpin()
        self.cache.pools.free()
        if not keep_store:
            self.store.close()

    def check_integrity(self) -> None:
        """Check the server's bookkeeping between two steps.

        Raises:
            AssertionError: something is pinned, a slot is lost, or the budget is exceeded.
        """
        self.host_planned.fetcher.collect()
        self._release_disk()
        flying = ((fetch.precision, fetch.slot, fetch.kept) for fetch in self.host_planned.on_their_way())
        check_cache(self.cache, flying, moving=self.policy.residency.migrating is not None)
        if self.host_cache is not None:
            self.host_cache.check_integrity()


@contextlib.contextmanager
def _host_memory_errors() -> Iterator[None]:
    """Raise a ConfigError in place of a StoreError in this context."""
    try:
        yield
    except StoreError as error:
        raise ConfigError(f"vllm-dymoe: {error}.", option="host_memory") from error


def precision_of(server: ExpertServer) -> Mapping[str, Any]:
    """Return what decides precision now, and its effect on a single token.

    The result is JSON-serialisable.
    """
    options, layers = server.options, len(server.experts.layers)
    shares = server.policy.precision.all_shares(server.experts)
    return {
        "policy": server.policy.name,
        "policy_options": dict(options.policy_options),
        "high": options.high,
        "low": options.low,
        "stored_bits": sorted(server.experts.formats, reverse=True),
        "share_of_precisions_in_decode": {
            precision.value: sum(shares[precision]) / layers for precision in Precision if precision in shares
        },
        "slots": {precision.value: count for precision, count in server.slot_plan.slots.items()},
    }


def _untrained_predictor(policy: Policy, experts: ModelExperts) -> Predictor | None:
    """Return the predictor of a policy that needs neither gates nor training.

    None if the policy has no such predictor.
    """
    prefetch = policy.prefetch
    if prefetch is None or prefetch.needs_gates or prefetch.needs_predictor:
        return None
    return prefetch.make(RoutedModel(len(experts.layers), experts.num_experts, experts.top_k))


def _check_misses(options: Options, store: HostStore, *, on_cpu: bool) -> None:
    if options.computes_misses and not (store.readable or (on_cpu and store.mapped)):
        raise ConfigError(
            f'vllm-dymoe: misses = "{options.misses}" is impossible, because the experts are not all in memory; use '
            'host_store "pinned", or leave the option out.',
            option="misses",
        )


def _known_rate(options: Options, device: torch.device) -> float | None:
    """Return bytes per second of an emulated link.

    Infinity without a link; None for a link that has to be measured.
    """
    return None if device.type == "cuda" else 1e9 * (options.link_gbps or math.inf)


def _make_disk_queue(
    store: HostStore, timeout: float | None, device: torch.device, lock: Callable[[torch.Tensor], str | None]
) -> DiskQueue:
    """Return the queue that reads experts from disk.

    Raises:
        ConfigError: there is no memory to read into, or no native library.
    """
    try:
        return DiskQueue(store, timeout, device, lock)
    except OSError as error:
        raise ConfigError(
            f"vllm-dymoe: experts cannot be read from disk for the device, because {error}; free host memory."
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"vllm-dymoe: experts on disk cannot be brought to the device, because {error}; install vllm-dymoe again "
            'with a C++ compiler, or use host_store "pinned".',
            option="host_store",
        ) from error


def _make_decode_kernel(
    parts: Parts, kernel: "CpuKernel | TritonKernel", experts: ModelExperts, options: Options, policy: Policy,
    all_experts: int,
) -> SmallBatchKernel:  # fmt: skip
    """Return what plans and computes on a device.

    Args:
        all_experts: experts of all ranks among which precision is chosen; 0 to choose among this rank's.

    Raises:
        ConfigError: the device cannot.
    """
    if not policy.precision.planned:
        raise ConfigError(
            f'vllm-dymoe: policy "{policy.name}" chooses precisions with Python code, which no device runs; describe '
            "them by critical_counts or thresholds, or serve on a CPU.",
            option="policy",
        )
    if not parts.device_memory.shares_addresses():
        raise ConfigError(
            "vllm-dymoe: this GPU has other addresses for pinned host memory than the CPU, and its kernels fetch "
            "missing experts from there; use a system with unified addressing (on Linux, with a current driver)."
        )
    try:
        if not isinstance(kernel, CpuKernel):
            check_experts(all_experts)
        return parts.decode_kernel(kernel, experts, options.link_gbps)
    except ValueError as error:
        raise ConfigError(
            f"vllm-dymoe: a GPU cannot serve this model, because {error}; serve it on a CPU, and please report it."
        ) from error
