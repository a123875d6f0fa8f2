"""Every MoE layer of one model on one rank: how the budget is spent, and what changes while ``serving`` has steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.host_memory import whole_pages
from vllm_dymoe.kernels import CpuKernel, ExpertKernel, make_kernel
from vllm_dymoe.predict import Measured, Predictor
from vllm_dymoe.residency.format import ModelExperts
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.branch import Branch, make_branch
from vllm_dymoe.runtime.decisions import DRAFTED, device_decides
from vllm_dymoe.runtime.decode_path import DECODE_ROWS, DecodeKernel, DecodePath
from vllm_dymoe.runtime.decode_plain import PlainDecode
from vllm_dymoe.runtime.device_memory import make_device_memory
from vllm_dymoe.runtime.device_side import DecodeCounts
from vllm_dymoe.runtime.host_side import HostSide
from vllm_dymoe.runtime.memory import Budget, ExpertMemory, Writer, check_memory
from vllm_dymoe.runtime.migration import Agree, Migration
from vllm_dymoe.runtime.precision import changed_precision
from vllm_dymoe.runtime.serving import Serving
from vllm_dymoe.runtime.sizing import (
    SlotPlan,
    limit_in_bytes,
    minimum_budget,
    plan_slots,
    slot_bits,
    tier_bits,
    workspace_bytes,
)
from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.store import FileStore, HostStore, StoreError
from vllm_dymoe.store.memory import host_memory_bytes
from vllm_dymoe.store.page_lock import CudaPageLock
from vllm_dymoe.systems import System, make_system
from vllm_dymoe.transfer import HostLevel, TransferEngine, make_engine


class Parts:
    """What a runtime is made of on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.device_memory = device, make_device_memory(device)

    def memory(self, store: HostStore, writer: Writer) -> ExpertMemory:
        return ExpertMemory(store, self.device, self.device_memory, writer)

    def decode_kernel(
        self, kernel: ExpertKernel, experts: ModelExperts, link_gbps: float | None = None
    ) -> DecodeKernel:
        """What decides and computes a decode step without the host, behind an emulated link if there is one; ValueError
        if the kernel cannot."""
        if isinstance(kernel, CpuKernel):
            return PlainDecode(kernel, experts.formats, link_gbps)
        # Importing triton takes a second, which only a GPU needs.
        from vllm_dymoe.runtime.decode_triton import TritonDecode

        return TritonDecode(kernel, experts, DECODE_ROWS)

    def lock(self, memory: torch.Tensor) -> str | None:
        """Lock memory for the device; what is in the way, if something is."""
        if self.device.type == "cpu":
            return None
        return CudaPageLock(self.device).lock(memory.data_ptr(), whole_pages(memory.numel()))

    def branch(self) -> Branch:
        return make_branch(self.device)


@dataclass(frozen=True)
class _Spending:
    """What a plan of slots follows from, beside options and system."""

    experts: ModelExperts  # of the rank
    filled: bool  # slots for every expert are filled at start
    automatic: int  # bytes to use if the budget is automatic

    def plan(self, budget: ExpertBudget | int, options: Options, system: System, beside: int) -> SlotPlan:
        """Of a budget, or a limit in bytes, of which ``beside`` bytes are no slots; ConfigError as ``plan_slots``."""
        if isinstance(budget, ExpertBudget):
            budget = limit_in_bytes(budget, self.experts, options, beside, self.automatic)
        return plan_slots(self.experts, options, system, budget, beside, filled=self.filled)


class MoERuntime:
    """Every MoE layer of one model on one rank; ConfigError if the budget cannot hold one expert of each tier in use.

    Args:
        agree: with the ranks that have other parts of the same experts, for a system that moves versions.
        around: MoE layers of a pipeline's stages before this one and behind it.
        rates: file that keeps how fast link and host are; None to measure anew.
    """

    options: Options  # in force
    plan: SlotPlan  # how the budget is spent
    budget: Budget  # every byte of it

    def __init__(
        self,
        store: HostStore,
        options: Options,
        device: torch.device,
        automatic_budget: int = 0,  # bytes to use if ``options.expert_budget`` is automatic
        system: System | None = None,  # in place of the one that the options name
        engine: TransferEngine | None = None,  # in place of the one that fits the device
        predictor: Predictor | None = None,
        *,
        obstacle: str = "",  # why the host has to decide in decode, if the model is such a one
        agree: Agree = list,
        around: tuple[int, int] = (0, 0),
        parts: Parts | None = None,  # in place of those of the device
        rates: Path | None = None,
    ) -> None:
        self.store, self.experts, self.device = store, store.experts, device
        self._parts = parts = parts or Parts(device)
        formats, system = self.experts.formats.values(), system or make_system(options).of_stage(*around)
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
            obstacle = "this device has other addresses for page-locked host memory than the host"
        _check_misses(options, store, on_cpu=device.type == "cpu" and options.link_gbps is None)
        decides, why_not = device_decides(options, system, device.type, readable=store.readable, obstacle=obstacle)
        decoding = None
        if decides:
            decoding, why_not = _make_decode_kernel(parts, self.kernel, self.experts, options)
        self.host_side = HostSide(options, self.experts, device, decoding, parts.lock)  # computes misses, if asked to
        self.host_decides_because = why_not  # if the device was to decide
        writer = Writer.DEVICE if system.residency.migrating is None else Writer.PLANNER
        memory = self.memory = parts.memory(store, Writer.HOST if decoding is None else writer)
        self.decode: DecodePath | None = None
        if decoding is not None and (side := memory.device_side) is not None:
            recorded = options.trace is not None
            self.decode = DecodePath(self.experts, side.table, decoding, device, parts.branch(), recorded=recorded)
        measured = None if predictor is None or decoding is not None else Measured(predictor)  # a device asks none
        self.level = store if isinstance(store, HostLevel) and not store.whole else None
        self.serving = Serving(self.memory, self.kernel, self.engine, measured, self.level)
        self.serving.records_fates = options.trace is not None
        self.host_side.join(self.serving, rates)
        files = self.level.files if self.level else store
        if isinstance(files, FileStore):
            self.serving.disk = files.counts
        self._agree, self._around = agree, around
        self._counts: DecodeCounts | None = None
        self.asleep = 0  # at which level
        self._spending = _Spending(self.experts, decoding is not None, automatic_budget)
        self._allocate(options, system, self._spending.plan(options.expert_budget, options, system, self.beside))

    # -- what can change between two steps --------------------------------------------------------

    def resize(self, budget: Any) -> None:
        """Change the expert budget, as the option has it; the cache starts empty, and what a smaller one leaves goes
        back to the device. The old one stays with a ValueError: it is not a budget, or cannot hold one expert of each
        tier, or the device has not so much, or a read that was given up still has not ended."""
        plan = self._spending.plan(ExpertBudget.parse(budget), self.options, self.system, self.beside)
        self._replace("expert_budget", self.options, self.system, plan)

    def set_precision(self, **changes: Any) -> None:
        """Change retention, tiers or another parameter of the system, as
        :func:`~vllm_dymoe.runtime.precision.changed_precision` takes them. The budget stays; where its slots have to be
        shared out in another way the cache starts empty. With a ConfigError all stays as it was: a value cannot be
        honoured, or a read that was given up has not ended."""
        options = changed_precision(self.options, self.experts.formats, changes)
        system = make_system(options).of_stage(*self._around)
        if self.decode is not None and not system.residency.on_device:
            raise ConfigError(
                "vllm-dymoe: the precision stays as it was: the device decides about experts in decode, and this needs "
                'the host; start with decisions "host".'
            )
        self._take_decode_counts()  # of the bit-widths that they had
        plan = self._spending.plan(self.plan.limit, options, system, self.beside)
        if plan == self.plan and slot_bits(self.experts, options, system.precision.tiers) == self.memory.bits:
            self._serve_with(options, system)
        else:
            self._replace("precision", options, system, plan)

    def drop_predictor(self) -> None:
        """Foresee nothing from now on."""
        self.serving.predictor = None

    def _replace(self, what: str, options: Options, system: System, plan: SlotPlan) -> None:
        """Go on with other slots; if they cannot be had, with the old ones and a ConfigError: slots cannot go now, or
        there is no memory."""
        check_awake(self, f"a change of {what}")
        bits = slot_bits(self.experts, options, system.precision.tiers)
        formats = {tier: self.experts.formats[width] for tier, width in bits.items()}
        self.memory.pools.check_growth(plan, self.plan, formats)
        before = self.options, self.system, self.plan
        self.memory.pools.free()
        try:
            self._allocate(options, system, plan)
        except ConfigError:
            self.memory.pools.free()
            self._allocate(*before)
            raise

    def _allocate(self, options: Options, system: System, plan: SlotPlan) -> None:
        """Serve with other slots; the old ones are gone, so that there is one arena at a time."""
        memory, serving, migrating = self.memory, self.serving, system.residency.migrating
        before = serving.migration
        bits = slot_bits(self.experts, options, system.precision.tiers)
        memory.allocate(plan, bits, reuse_high=system.precision.reuses_high)
        self.plan, self.budget = plan, memory.budget
        if self.decode is not None and memory.device_side is not None:
            side, passes = memory.device_side, migrating is None  # the planner's staging slots are for moves
            self.decode.wide.set_slots(side.staging if passes else dict.fromkeys(side.staging, 0), side.shares)
        self._serve_with(options, system)
        serving.begin()
        if migrating is not None:
            if self.decode is not None and self._counts is None:  # once: captured steps add to them
                self._counts = DecodeCounts(self.decode.table)
                self.decode.wide.count = self._counts.add_layer
            decoded = self._counts
            if decoded is not None:
                decoded.clear()
            known = before.hotness if before and before.hotness.any() else None
            serving.migration = Migration(serving.fetcher, migrating, known, self._agree, decoded)

    def _serve_with(self, options: Options, system: System) -> None:
        self.options = options
        system.precision.begin(self.experts.curves)
        self.serving.system, self.serving.bits = system, {tier: tier_bits(options, tier) for tier in Tier}
        side, costs = self.memory.device_side, self.host_side.costs(self.serving)
        self.memory.table.there[:], self.serving.computes_there = costs, bool(costs.any())
        if side is not None:
            side.serve(system, self.serving.bits, self.memory.bits)
            side.table.there.copy_(torch.from_numpy(costs))
            shares = len(system.precision.tiers) == 1 and system.residency.migrating is None and options.trace is None
            if self.decode is not None:  # fates of a trace are of whole steps
                self.decode.costs = costs if shares and costs.any() else None
            self.memory.table.reuse_high[:] = system.precision.reuses_high

    # -- seeing inside ----------------------------------------------------------------------------

    @property
    def system(self) -> System:
        return self.serving.system

    @property
    def predictor(self) -> Measured | None:
        return self.serving.predictor

    @property
    def beside(self) -> int:
        """Bytes of the budget that are no slots: the kernel's workspace, predictor, and what a device decides by."""
        predictor = 0 if self.predictor is None else self.predictor.nbytes
        return self.kernel.workspace_bytes + predictor + (0 if self.decode is None else self.decode.nbytes)

    @property
    def minimum_budget(self) -> int:
        return minimum_budget(self.experts, self.options, self.system, self.beside)

    def stats(self) -> RuntimeStats:
        self._take_decode_counts()
        return RuntimeStats.collect(self.serving)

    def _take_decode_counts(self) -> None:
        if self.memory.device_side is not None:
            self.memory.read_device()
            self.memory.device_side.take_counts(self.serving.counts, self.engine.stats, self.serving.prefetch_stats)

    def reset_stats(self) -> None:
        self._take_decode_counts()
        self.serving.reset_stats()

    def close(self, *, keep_store: bool = False) -> None:
        """End the transfer threads, give the slots' memory back, and close the store or keep it for another runtime."""
        self.engine.close()
        self.host_side.close()
        self.memory.pools.free()
        if not keep_store:
            self.store.close()

    def check_integrity(self) -> None:
        """AssertionError unless, between steps, nothing is pinned, no slot is lost, and the budget is kept."""
        self.serving.fetcher.collect()
        flying = ((fetch.tier, fetch.slot, fetch.kept) for fetch in self.serving.on_their_way())
        check_memory(self.memory, flying, moving=self.system.residency.migrating is not None)
        if self.level is not None:
            self.level.check_integrity()


def sleep(runtime: MoERuntime, level: int) -> None:
    """Give the slots' memory back until ``wake``, from level 2 on the host memory of the experts, too; what runs
    without requests may go on. ConfigError if a read that was given up has not ended: all stays as it was."""
    check_awake(runtime, "falling asleep")
    if level > 1 and isinstance(runtime.store, HostLevel):
        try:
            runtime.store.sleep()
        except StoreError as error:
            raise ConfigError(f"vllm-dymoe: {error}.") from error
        runtime.memory.store_moved()
    runtime.asleep = level
    runtime.memory.pools.free()


def wake(runtime: MoERuntime) -> None:
    """Have slots again, which are empty but where all have one. ConfigError if there is no memory, StoreError if
    the experts cannot be read; it goes on sleeping."""
    if runtime.asleep > 1 and isinstance(runtime.store, HostLevel):
        runtime.store.wake()
        runtime.asleep = 1
    if runtime.asleep:
        try:
            runtime._allocate(runtime.options, runtime.system, runtime.plan)
        except ConfigError:
            runtime.memory.pools.free()
            raise
        runtime.asleep = 0


def check_awake(runtime: MoERuntime, what: str) -> None:
    """ConfigError if slots cannot go now: they have gone, or a read that was given up writes into one."""
    if runtime.asleep:
        raise ConfigError(f"vllm-dymoe: {what} is impossible while the engine sleeps; wake it up first.")
    if not runtime.serving.end():
        raise ConfigError(
            f"vllm-dymoe: {what} is impossible while reads that were given up have not ended "
            f"({runtime.store.description}); try again later."
        )


def resize_host_memory(runtime: MoERuntime, wanted: Any) -> None:
    """Change the budget of host memory, as the option has it; the level starts empty. On a CPU it is the expert budget.
    The old one stays with a ValueError: there is no level, or the budget is too small or more than there is."""
    parsed, level = ExpertBudget.parse(wanted), runtime.level
    if level is None and runtime.device.type == "cpu" and runtime.options.link_gbps is None:
        return runtime.resize(parsed)
    nbytes = host_memory_bytes(parsed, runtime.experts)
    why = "say how many bytes it is to be" if level else f"experts are in {runtime.store.description}"
    if level is None or nbytes is None:
        raise ConfigError(f"vllm-dymoe: host_memory stays as it was: {why}.")
    check_awake(runtime, "a change of host_memory")
    try:
        level.resize(nbytes)
    except StoreError as error:
        raise ConfigError(f"vllm-dymoe: {error}.") from error


def precision_of(runtime: MoERuntime) -> Mapping[str, Any]:
    """What decides precision at the moment, and what it means for a single token, as JSON-serialisable data."""
    options, layers = runtime.options, len(runtime.experts.layers)
    shares = runtime.system.precision.all_shares(runtime.experts)
    return {
        "system": runtime.system.name,
        "system_options": dict(options.system_options),
        "hi": options.hi,
        "lo": options.lo,
        "stored_bits": sorted(runtime.experts.formats, reverse=True),
        "share_of_tiers_in_decode": {tier.value: sum(shares[tier]) / layers for tier in Tier if tier in shares},
        "slots": {tier.value: count for tier, count in runtime.plan.slots.items()},
    }


def _check_misses(options: Options, store: HostStore, *, on_cpu: bool) -> None:
    if options.computes_misses and not (store.readable or (on_cpu and store.mapped)):
        raise ConfigError(
            f'vllm-dymoe: misses = "{options.misses}" is impossible, because the experts are not in memory; use '
            'host_store "pinned", or leave the option out.'
        )


def _make_decode_kernel(
    parts: Parts, kernel: ExpertKernel, experts: ModelExperts, options: Options
) -> tuple[DecodeKernel | None, str]:
    """None and the reason where the kernels cannot, so that the host decides; ConfigError if the device was to."""
    try:
        return parts.decode_kernel(kernel, experts, options.link_gbps), ""
    except ValueError as error:
        if options.decisions == "device":
            raise ConfigError(f'vllm-dymoe: decisions = "device" is impossible, because {error}.') from error
        return None, str(error)
