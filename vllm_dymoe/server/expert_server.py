"""Every MoE layer of one model on one rank: how the budget is spent, and what changes while ``serving`` has steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.cache.budget import (
    SlotPlan,
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    precision_bits,
    slot_bits,
    workspace_bytes,
)
from vllm_dymoe.cache.device_cache import Budget, DeviceCache, Writer, check_cache
from vllm_dymoe.cache.device_memory import make_device_memory
from vllm_dymoe.cache.device_table import DeviceCounts
from vllm_dymoe.cache.expert_cache import Fetcher
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.migration import Agree, Migration
from vllm_dymoe.cache.pages import whole_pages
from vllm_dymoe.cache.store import FileStore, HostStore, StoreError
from vllm_dymoe.cache.store.memory import host_memory_bytes
from vllm_dymoe.cache.store.page_lock import CudaPageLock
from vllm_dymoe.cache.transfer import TransferEngine, make_engine
from vllm_dymoe.executor.copy_branch import Branch, make_branch
from vllm_dymoe.executor.cpu_execution import CpuExecution
from vllm_dymoe.executor.cpu_executor import CpuExecutor
from vllm_dymoe.executor.cpu_worker import CpuWorker
from vllm_dymoe.executor.device_planning import DRAFTED, plans_on_device
from vllm_dymoe.executor.host_planned import HostPlannedLayers, StepCounts
from vllm_dymoe.executor.plain_kernels import PlainKernels
from vllm_dymoe.executor.small_batch import SmallBatches, SmallBatchKernel
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.kernels import CpuKernel, ExpertKernel, make_kernel
from vllm_dymoe.options import ConfigError, ExpertBudget, Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.table import CODES
from vllm_dymoe.policies import Policy, make_policy
from vllm_dymoe.prefetch import Measured, Predictor
from vllm_dymoe.server.precision import changed_precision
from vllm_dymoe.server.stats import ServerStats


class Parts:
    """What a server is made of on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_memory = device, make_device_memory(device)

    def cache(self, store: HostStore, writer: Writer) -> DeviceCache:
        return DeviceCache(store, self.device, self.device_memory, writer)

    def decode_kernel(
        self, kernel: ExpertKernel, experts: ModelExperts, link_gbps: float | None = None
    ) -> SmallBatchKernel:
        """What decides and computes a decode step without the host, behind an emulated link if there is one; ValueError
        if the kernel cannot."""
        if isinstance(kernel, CpuKernel):
            return PlainKernels(kernel, experts.formats, link_gbps)
        # Importing triton takes a second, which only a GPU needs.
        from vllm_dymoe.executor.triton_kernels import TritonKernels

        return TritonKernels(kernel, experts, SMALL_BATCH_ROWS)

    def lock(self, memory: torch.Tensor) -> str | None:
        """Lock memory for the device; what is in the way, if something is."""
        if self.device.type == "cpu":
            return None
        return CudaPageLock(self.device).lock(memory.data_ptr(), whole_pages(memory.numel()))

    def branch(self) -> Branch:
        return make_branch(self.device)


@dataclass(frozen=True)
class _Spending:
    """What a plan of slots follows from, beside options and policy."""

    experts: ModelExperts  # of the rank
    filled: bool  # slots for every expert are filled at start
    automatic: int  # bytes to use if the budget is automatic

    def plan(self, budget: ExpertBudget | int, options: Options, policy: Policy, overhead: int) -> SlotPlan:
        """Of a budget, or a limit in bytes, of which ``overhead`` bytes are no slots; ConfigError as ``plan_slots``."""
        if isinstance(budget, ExpertBudget):
            budget = limit_in_bytes(budget, self.experts, options, overhead, self.automatic)
        return plan_slots(self.experts, options, policy, budget, overhead, filled=self.filled)


class ExpertServer:
    """Every MoE layer of one model on one rank; ConfigError if the budget cannot hold one expert of each precision in
    use.

    Args:
        agree: with the ranks that have other parts of the same experts, for a policy that moves versions.
        around: MoE layers of a pipeline's stages before this one and behind it.
        rates: file that keeps how fast link and host are; None to measure anew.
    """

    options: Options  # in force
    slot_plan: SlotPlan  # how the budget is spent
    budget: Budget  # every byte of it

    def __init__(
        self,
        store: HostStore,
        options: Options,
        device: torch.device,
        automatic_budget: int = 0,  # bytes to use if ``options.expert_budget`` is automatic
        policy: Policy | None = None,  # in place of the one that the options name
        engine: TransferEngine | None = None,  # in place of the one that fits the device
        predictor: Predictor | None = None,
        *,
        obstacle: str = "",  # why the host has to plan in decode, if the model is such a one
        agree: Agree = list,
        around: tuple[int, int] = (0, 0),
        parts: Parts | None = None,  # in place of those of the device
        rates: Path | None = None,
    ) -> None:
        self.store, self.experts, self.device = store, store.experts, device
        on_cpu = device.type == "cpu" and options.link_gbps is None
        self._plain_cpu = on_cpu and engine is None and parts is None  # nothing stands in for another device
        parts = parts or Parts(device)
        formats, policy = self.experts.formats.values(), policy or make_policy(options).of_stage(*around)
        matrices = [matrix for fmt in formats for matrix in fmt.matrices]
        try:
            workspace = workspace_bytes(self.experts, device.type)
            self.kernel: ExpertKernel = make_kernel(device, workspace, matrices, options.activations)
        except ValueError as error:
            raise ConfigError(f"vllm-dymoe: {error}") from error
        largest, timeout = max(fmt.nbytes for fmt in formats), options.transfer_timeout_s or None
        self.engine = engine or make_engine(store, device, largest, timeout, options.link_gbps)
        obstacle = DRAFTED if self.experts.draft_layers else obstacle
        if store.readable and not obstacle and not parts.device_memory.shares_addresses():
            obstacle = "this device has other addresses for pinned host memory than the host"
        _check_misses(options, store, on_cpu=on_cpu)
        decides, why_not = plans_on_device(options, policy, device.type, readable=store.readable, obstacle=obstacle)
        decoding = None
        if decides:
            decoding, why_not = _make_decode_kernel(parts, self.kernel, self.experts, options)
        watched = parts.device_memory.ends_long_kernels()
        self.cpu_execution = CpuExecution(
            options, store, self.engine, device, decoding, parts.lock, rates, ends_long_kernels=watched
        )
        self.host_plans_because = why_not  # if the device was to decide
        writer = Writer.DEVICE if policy.residency.migrating is None else Writer.PLANNER
        cache = self.cache = parts.cache(store, Writer.HOST if decoding is None else writer)
        self.small_batches: SmallBatches | None = None
        if decoding is not None and (side := cache.device_table) is not None:
            recorded = options.trace is not None
            self.small_batches = SmallBatches(
                self.experts, side.table, decoding, device, parts.branch(), recorded=recorded, prefetch=policy.prefetch
            )
        # A device that plans asks no predictor, and neither does a CPU whose cores would bring what it names.
        unasked = decoding is not None or (self._plain_cpu and self.engine.occupies_cores)
        measured = None if predictor is None or unasked else Measured(predictor)
        self.host_cache = store if isinstance(store, HostCache) and not store.whole else None
        self._predictor = measured
        files = self.host_cache.files if self.host_cache else store
        self._step_counts = StepCounts(disk=files.counts) if isinstance(files, FileStore) else StepCounts()
        self._agree, self._around = agree, around
        self._counts: DeviceCounts | None = None
        self._layers: HostPlannedLayers | None = None
        self.asleep = 0  # at which level
        self._spending = _Spending(self.experts, decoding is not None, automatic_budget)
        self._allocate(options, policy, self._spending.plan(options.expert_budget, options, policy, self.overhead))

    # -- what can change between two steps --------------------------------------------------------

    def resize(self, budget: Any) -> None:
        """Change the expert budget, as the option has it; the cache starts empty, and what a smaller one leaves goes
        back to the device. The old one stays with a ValueError: it is not a budget, or cannot hold one expert of each
        precision, or the device has not so much, or a read that was given up still has not ended."""
        plan = self._spending.plan(ExpertBudget.parse(budget), self.options, self.policy, self.overhead)
        self._replace("expert_budget", self.options, self.policy, plan)

    def set_precision(self, /, **changes: Any) -> None:
        """Change retention, precisions or another parameter of the policy, as
        :func:`~vllm_dymoe.server.precision.changed_precision` takes them. The budget stays; where its slots have to be
        shared out in another way the cache starts empty. With a ConfigError all stays as it was: a value cannot be
        honoured, or a read that was given up has not ended."""
        options = changed_precision(self.options, self.experts.formats, changes)
        policy = make_policy(options).of_stage(*self._around)
        if self.small_batches is not None and policy.needs_host:
            raise ConfigError(
                "vllm-dymoe: the precision stays as it was: the device plans, and this needs the host, because "
                f'{policy.needs_host}; start with planning "host".'
            )
        self._take_decode_counts()  # of the bit-widths that they had
        plan = self._spending.plan(self.slot_plan.limit, options, policy, self.overhead)
        if plan == self.slot_plan and slot_bits(self.experts, options, policy.precision.precisions) == self.cache.bits:
            self.serve(options, policy)
        else:
            self._replace("precision", options, policy, plan)

    def drop_predictor(self) -> None:
        """Predict nothing from now on."""
        self._predictor = None
        self.serve(self.options, self.policy)

    def _replace(self, what: str, options: Options, policy: Policy, plan: SlotPlan) -> None:
        """Go on with other slots; if they cannot be had, with the old ones and a ConfigError: slots cannot go now, or
        there is no memory."""
        check_awake(self, f"a change of {what}")
        bits = slot_bits(self.experts, options, policy.precision.precisions)
        formats = {precision: self.experts.formats[width] for precision, width in bits.items()}
        self.cache.pools.check_growth(plan, self.slot_plan, formats)
        before = self.options, self.policy, self.slot_plan
        self.cache.pools.free()
        try:
            self._allocate(options, policy, plan)
        except ConfigError:
            self.cache.pools.free()
            self._allocate(*before)
            raise

    def _allocate(self, options: Options, policy: Policy, plan: SlotPlan) -> None:
        """Allocate slots and serve with them; the old ones are freed before, so that only one arena exists."""
        cache, migrating, before = self.cache, policy.residency.migrating, self._layers
        if before is not None:  # whose CPU executor counts in the table that goes
            self._take_decode_counts()
        bits = slot_bits(self.experts, options, policy.precision.precisions)
        cache.allocate(plan, bits, reuse_high=policy.precision.reuses_high)
        self.slot_plan, self.budget = plan, cache.budget
        if self.small_batches is not None and cache.device_table is not None:
            side, passes = cache.device_table, migrating is None  # the planner's staging slots are for moves
            self.small_batches.set_slots(side.staging if passes else dict.fromkeys(side.staging, 0), side.quotas)
        cache.pools.fence(self.engine.fence())
        # Policies that move slots between steps have no last-reader fence, so their copies wait for all computation.
        overlaps = policy.residency.overlaps and migrating is None
        fetcher, migration = Fetcher(cache, self.engine, overlaps=overlaps), None
        if migrating is not None:
            if self.small_batches is not None and self._counts is None:  # once: captured steps add to them
                self._counts = DeviceCounts(self.small_batches.table)
                self.small_batches.large.count = self._counts.add_layer
            if self._counts is not None:
                self._counts.clear()
            known = before.migration.hotness if before is not None and before.migration is not None else None
            known = known if known is not None and known.any() else None
            migration = Migration(fetcher, migrating, known, self._agree, self._counts)
        self._layers = self._make_layers(options, policy, fetcher, migration)

    def serve(self, options: Options, policy: Policy) -> None:
        """Serve with other options and another policy, in the slots that exist."""
        self._take_decode_counts()
        layers = self.host_planned
        layers.settle()
        self._layers = self._make_layers(options, policy, layers.fetcher, layers.migration)

    def _make_layers(
        self, options: Options, policy: Policy, fetcher: Fetcher[DeviceCache], migration: Migration | None
    ) -> HostPlannedLayers:
        """Write costs and precisions into the tables, and build the object that runs the steps."""
        cache, table, records = self.cache, self.cache.table, options.trace is not None
        self.options = options
        policy.precision.begin(self.experts.curves)
        bits = {precision: precision_bits(options, precision) for precision in Precision}
        costs = self.cpu_execution.costs(bits)
        table.cpu_costs[:], table.reuse_high[:] = costs, policy.precision.reuses_high
        if cache.device_table is not None:
            cache.device_table.serve(policy, bits, cache.bits)
            cache.device_table.table.cpu_costs.copy_(torch.from_numpy(costs))
        if self.small_batches is not None:  # actions of a trace are of whole steps
            shares = len(policy.precision.precisions) == 1 and policy.residency.migrating is None and not records
            self.small_batches.costs = costs if shares and costs.any() else None
        worker = self.cpu_execution.worker
        return HostPlannedLayers(
            fetcher,
            self.kernel,
            policy,
            bits,
            self._predictor,
            self._step_counts,
            executes_on_cpu=bool(costs.any()),
            cpu=self._make_cpu_executor(policy, bits, migration, executes=bool(costs.any()), records=records),
            cpu_worker=worker if isinstance(worker, CpuWorker) else None,
            migration=migration,
            host_cache=self.host_cache,
            records_actions=records,
        )

    def _make_cpu_executor(
        self, policy: Policy, bits: Mapping[Precision, int], migration: Migration | None, *, executes: bool,
        records: bool,
    ) -> CpuExecutor | None:  # fmt: skip
        """Return the CPU executor; None beside a device or an emulated link, or without the native library."""
        kernel, cache = self.kernel, self.cache
        if not (self._plain_cpu and isinstance(kernel, CpuKernel) and kernel.library and cache.writer is Writer.HOST):
            return None
        formats = {CODES[precision]: self.experts.formats.get(bits[precision]) for precision in Precision}
        if Precision.HIGH not in cache.bits:
            formats[CODES[Precision.HIGH]] = None
        del formats[CODES[Precision.SKIPPED]]
        uses = None if migration is None else migration.uses
        return CpuExecutor(cache, kernel, policy, formats, executes=executes, uses=uses, records=records)

    # -- seeing inside ----------------------------------------------------------------------------

    @property
    def host_planned(self) -> HostPlannedLayers:
        """The layers, as they are served now."""
        assert self._layers is not None
        return self._layers

    @property
    def policy(self) -> Policy:
        return self.host_planned.policy

    @property
    def predictor(self) -> Measured | None:
        return self._predictor

    @property
    def overhead(self) -> int:
        """Bytes of the budget that are no slots: the kernel's workspace, predictor, and what a device decides by."""
        predictor = 0 if self.predictor is None else self.predictor.nbytes
        return (
            self.kernel.workspace_bytes + predictor + (0 if self.small_batches is None else self.small_batches.nbytes)
        )

    @property
    def minimum_budget(self) -> int:
        return minimum_budget(self.experts, self.options, self.policy, self.overhead)

    def stats(self) -> ServerStats:
        self._take_decode_counts()
        return ServerStats.collect(self.host_planned)

    def _take_decode_counts(self) -> None:
        if self.host_planned.cpu is not None:
            self._step_counts.residency.take(self.cache.table.counters)
        if self.cache.device_table is not None:
            self.cache.read_device()
            counts = self._step_counts
            self.cache.device_table.take_counts(counts.residency, self.engine.stats, counts.prefetch)

    def reset_stats(self) -> None:
        self._take_decode_counts()
        self.host_planned.reset_stats()

    def close(self, *, keep_store: bool = False) -> None:
        """End the transfer threads, give the slots' memory back, and close the store or keep it for another server."""
        if self.small_batches is not None:
            self.small_batches.settle()
        self.engine.close()
        self.cpu_execution.close()
        self.cache.pools.free()
        if not keep_store:
            self.store.close()

    def check_integrity(self) -> None:
        """AssertionError unless, between steps, nothing is pinned, no slot is lost, and the budget is kept."""
        self.host_planned.fetcher.collect()
        flying = ((fetch.precision, fetch.slot, fetch.kept) for fetch in self.host_planned.on_their_way())
        check_cache(self.cache, flying, moving=self.policy.residency.migrating is not None)
        if self.host_cache is not None:
            self.host_cache.check_integrity()


def sleep(server: ExpertServer, level: int) -> None:
    """Give the slots' memory back until ``wake``, from level 2 on the host memory of the experts, too; what runs
    without requests may go on. ConfigError if a read that was given up has not ended: all stays as it was."""
    check_awake(server, "falling asleep")
    if level > 1 and isinstance(server.store, HostCache):
        try:
            server.store.sleep()
        except StoreError as error:
            raise ConfigError(f"vllm-dymoe: {error}.") from error
        server.cache.store_moved()
    server.asleep = level
    server.cache.pools.free()


def wake(server: ExpertServer) -> None:
    """Have slots again, which are empty but where all have one. ConfigError if there is no memory, StoreError if
    the experts cannot be read; it goes on sleeping."""
    if server.asleep > 1 and isinstance(server.store, HostCache):
        server.store.wake()
        server.asleep = 1
    if server.asleep:
        try:
            server._allocate(server.options, server.policy, server.slot_plan)
        except ConfigError:
            server.cache.pools.free()
            raise
        server.asleep = 0


def check_awake(server: ExpertServer, what: str) -> None:
    """ConfigError if slots cannot go now: they have gone, or a read that was given up writes into one."""
    if server.asleep:
        raise ConfigError(f"vllm-dymoe: {what} is impossible while the engine sleeps; wake it up first.")
    if server.small_batches is not None:
        server.small_batches.settle()  # its copies write into slots
    if not server.host_planned.end():
        raise ConfigError(
            f"vllm-dymoe: {what} is impossible while reads that were given up have not ended "
            f"({server.store.description}); try again later."
        )


def resize_host_memory(server: ExpertServer, wanted: Any) -> None:
    """Change the budget of host memory, as the option has it; the level starts empty. On a CPU it is the expert budget.
    The old one stays with a ValueError: there is no level, or the budget is too small or more than there is."""
    parsed, host_cache = ExpertBudget.parse(wanted), server.host_cache
    if host_cache is None and server.device.type == "cpu" and server.options.link_gbps is None:
        return server.resize(parsed)
    nbytes = host_memory_bytes(parsed, server.experts)
    why = "say how many bytes it is to be" if host_cache else f"experts are in {server.store.description}"
    if host_cache is None or nbytes is None:
        raise ConfigError(f"vllm-dymoe: host_memory stays as it was: {why}.")
    check_awake(server, "a change of host_memory")
    try:
        host_cache.resize(nbytes)
    except StoreError as error:
        raise ConfigError(f"vllm-dymoe: {error}.") from error


def precision_of(server: ExpertServer) -> Mapping[str, Any]:
    """What decides precision at the moment, and what it means for a single token, as JSON-serialisable data."""
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


def _check_misses(options: Options, store: HostStore, *, on_cpu: bool) -> None:
    if options.computes_misses and not (store.readable or (on_cpu and store.mapped)):
        raise ConfigError(
            f'vllm-dymoe: misses = "{options.misses}" is impossible, because the experts are not in memory; use '
            'host_store "pinned", or leave the option out.'
        )


def _make_decode_kernel(
    parts: Parts, kernel: ExpertKernel, experts: ModelExperts, options: Options
) -> tuple[SmallBatchKernel | None, str]:
    """None and the reason where the kernels cannot, so that the host plans; ConfigError if the device was to."""
    try:
        return parts.decode_kernel(kernel, experts, options.link_gbps), ""
    except ValueError as error:
        if options.planning == "device":
            raise ConfigError(f'vllm-dymoe: planning = "device" is impossible, because {error}.') from error
        return None, str(error)
