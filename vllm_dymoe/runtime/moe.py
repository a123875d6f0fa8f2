"""Every MoE layer of one model on one rank: who decides, how the budget is spent, and what can change while it serves.

The steps themselves are ``serving``'s.
"""

from typing import Any

import torch

from vllm_dymoe.config import ConfigError, ExpertBudget, Options
from vllm_dymoe.kernels import CpuKernel, ExpertKernel, make_kernel
from vllm_dymoe.observe.timeline import CudaClock, HostClock, Timeline
from vllm_dymoe.predict import Measured, Predictor
from vllm_dymoe.residency.budget import BudgetTracker
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.ahead import Branch, make_branch
from vllm_dymoe.runtime.decisions import DRAFTED, device_decides
from vllm_dymoe.runtime.decode_path import DECODE_ROWS, DecodeKernel, DecodePath
from vllm_dymoe.runtime.decode_plain import PlainDecode
from vllm_dymoe.runtime.device_memory import make_device_memory
from vllm_dymoe.runtime.device_side import DecodeCounts
from vllm_dymoe.runtime.memory import ExpertMemory, Writer
from vllm_dymoe.runtime.migration import Agree, Migration
from vllm_dymoe.runtime.popularity import read_popularity
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
from vllm_dymoe.store import HostStore, ReadableStore
from vllm_dymoe.systems import System, make_system
from vllm_dymoe.transfer import TransferEngine, make_engine

_READERS = 1  # threads that read the host store ahead of the computation


class MoERuntime:
    """Every MoE layer of one model on one rank.

    Args:
        store: the experts' packed bytes.
        options: validated options.
        device: where slots are and computation happens.
        automatic_budget: bytes to use if ``options.expert_budget`` is automatic.
        system: in place of the one that the options name.
        engine: in place of the one that fits the device.
        predictor: names experts to fetch ahead; None for none.
        obstacle: why the host has to decide in decode, if the model is such a one.
        agree: with the ranks that have other parts of the same experts, for a system that moves versions.

    Raises:
        ConfigError: the budget cannot hold one expert of each tier that the system uses.
    """

    def __init__(
        self,
        store: HostStore,
        options: Options,
        device: torch.device,
        automatic_budget: int = 0,
        system: System | None = None,
        engine: TransferEngine | None = None,
        predictor: Predictor | None = None,
        *,
        obstacle: str = "",
        agree: Agree = list,
    ) -> None:
        self.store = store
        self.experts = store.experts
        self.device = device
        self._device_memory = make_device_memory(device)
        system = system or make_system(options)
        self.kernel: ExpertKernel = make_kernel(
            device,
            workspace_bytes(self.experts, device.type),
            [matrix for fmt in self.experts.formats.values() for matrix in fmt.matrices],
        )
        largest = max(fmt.nbytes for fmt in self.experts.formats.values())
        self.engine = engine or make_engine(
            store, device, _READERS, largest, options.transfer_timeout_s or None, options.link_gbps
        )
        measured = None if predictor is None else Measured(predictor)
        self._automatic_budget = automatic_budget
        decides, self.host_decides_because = device_decides(
            options,
            system,
            device.type,
            readable=isinstance(store, ReadableStore),
            obstacle=DRAFTED if self.experts.draft_layers else obstacle,
        )
        kernel = self._decode_kernel(options) if decides else None
        writer = Writer.DEVICE if system.residency.migrating is None else Writer.PLANNER
        self.memory = self.make_memory(Writer.HOST if kernel is None else writer)
        self.decode = None if kernel is None else self._make_decode_path(kernel, system, predictor)
        self.serving = Serving(self.memory, self.kernel, self.engine, measured, self.decode)
        self._expert_budget, self._agree = options.expert_budget, agree
        self._popularity = read_popularity(self.experts, system)
        self._allocate(options, system, self._plan(self._limit(options), options, system))

    def make_memory(self, writer: Writer) -> ExpertMemory:
        """Where this runtime keeps experts."""
        return ExpertMemory(self.store, self.device, self._device_memory, writer)

    def make_decode_kernel(self) -> DecodeKernel:
        """What decides and computes a decode step without the host."""
        if isinstance(self.kernel, CpuKernel):
            return PlainDecode(self.kernel, self.experts.formats)
        # Here and not above: importing triton takes a second, and nobody without a GPU needs it.
        from vllm_dymoe.runtime.decode_triton import TritonDecode

        return TritonDecode(self.kernel, self.experts, DECODE_ROWS)

    def make_branch(self) -> Branch:
        """Where a decode step without the host fetches ahead."""
        return make_branch(self.device)

    def _decode_kernel(self, options: Options) -> DecodeKernel | None:
        """None where the kernels cannot, so that the host decides after all.

        Raises:
            ConfigError: the device was to decide.
        """
        try:
            return self.make_decode_kernel()
        except ValueError as error:
            if options.decisions == "device":
                raise ConfigError(f'vllm-dymoe: decisions = "device" is impossible, because {error}.') from error
            self.host_decides_because = str(error)
            return None

    def _make_decode_path(self, kernel: DecodeKernel, system: System, predictor: Predictor | None) -> DecodePath:
        side = self.memory.device_side
        assert side is not None
        path = DecodePath(self.experts, side.table, kernel, self.device)
        named = None if predictor is None else predictor.on_device(self.device)
        ahead = system.foresight.projections_in_graph if system.foresight else 0
        if named is not None and ahead > 0 and not side.table.nested:
            path.look_ahead(named, self.make_branch())
            side.fetch_ahead(ahead)
        return path

    @property
    def system(self) -> System:
        """What chooses tiers."""
        return self.serving.system

    @property
    def predictor(self) -> Measured | None:
        """What names experts to fetch ahead."""
        return self.serving.predictor

    # -- memory -----------------------------------------------------------------------------------

    def resize(self, budget: Any) -> None:
        """Change the expert budget between two steps; the cache starts empty.

        The old slots' memory goes back to the device, so that what a smaller budget leaves is there for others.

        Args:
            budget: as the option ``expert_budget``.

        Raises:
            ValueError: it is not a budget, or cannot hold one expert of each tier, or the device has not so much, or a
                read that was given up still has not ended; the old one stays.
        """
        before = self._expert_budget
        self._expert_budget = ExpertBudget.parse(budget)
        try:
            plan = self._plan(self._limit(self.options), self.options, self.system)
            self._replace("expert_budget", self.options, self.system, plan)
        except ValueError:
            self._expert_budget = before
            raise

    def set_precision(self, **changes: Any) -> None:
        """Change retention, tiers or another parameter of the system, for the next step on.

        The budget stays as it is. Where its slots have to be shared out in another way the cache starts empty.

        Args:
            changes: values by name, as :func:`~vllm_dymoe.runtime.precision.changed_precision` takes them.

        Raises:
            ConfigError: a value cannot be honoured, or a read that was given up still has not ended; all stays as it
                was.
        """
        options = changed_precision(self.options, self.experts.formats, changes)
        system = make_system(options)
        if self.decode is not None and not system.residency.on_device:
            raise ConfigError(
                "vllm-dymoe: the precision stays as it was: the device decides about experts in decode, and this needs "
                'the host; start with decisions "host".'
            )
        self._take_decode_counts()  # of the bit-widths that they had
        plan = self._plan(self.plan.limit, options, system)
        if plan == self.plan and slot_bits(self.experts, options, system.precision.tiers) == self.memory.bits:
            self._serve_with(options, system)
        else:
            self._replace("the precision", options, system, plan)

    def set_predictor(self, predictor: Predictor) -> None:
        """Foresee with another predictor, for the next step on.

        Where it takes other memory than the one before, the slots are shared out again and the cache starts empty.
        Decode steps without the host fetch nothing ahead any more: graphs hold the predictor of their capture.

        Raises:
            ConfigError: the budget has no room for it, or a read that was given up still has not ended; the old one
                goes on.
        """
        serving, before = self.serving, self.predictor
        serving.predictor = named = Measured(predictor, before.stats if before else None)
        try:
            if before is None or before.nbytes != named.nbytes:
                plan = self._plan(self._limit(self.options), self.options, self.system)
                self._replace("the predictor", self.options, self.system, plan)
        except ConfigError:
            serving.predictor = before
            raise
        self._fetch_nothing_in_graphs()

    def stop_foreseeing(self) -> None:
        """Nothing is named ahead from the next step on."""
        self.serving.predictor = None
        self._fetch_nothing_in_graphs()

    @property
    def fetches_in_graphs(self) -> bool:
        """Whether decode steps without the host fetch ahead."""
        side = self.memory.device_side
        return side is not None and side.most_ahead > 0

    def _fetch_nothing_in_graphs(self) -> None:
        """A captured graph goes on asking the predictor of its capture, and heeds it no more."""
        if self.memory.device_side is not None:
            self.memory.device_side.fetch_ahead(0)

    def _replace(self, what: str, options: Options, system: System, plan: SlotPlan) -> None:
        """Go on with other slots; if they cannot be had, with the old ones.

        Raises:
            ConfigError: a read that was given up still writes into a slot, so that ``what`` cannot change; or there is
                no memory.
        """
        if not self.serving.end():
            raise ConfigError(
                f"vllm-dymoe: {what} cannot change while reads that were given up have not ended "
                f"({self.store.description}); try again later."
            )
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

    @property
    def free_device_bytes(self) -> int:
        """Bytes of the device's memory that are free for anybody."""
        return self._device_memory.available()

    @property
    def minimum_budget(self) -> int:
        """The smallest feasible budget in bytes."""
        return minimum_budget(self.experts, self.options, self.system, self._beside_experts)

    @property
    def _beside_experts(self) -> int:
        """Bytes of the budget that are no slots: the kernel's workspace, predictor, and what a device decides by."""
        predictor = 0 if self.predictor is None else self.predictor.nbytes
        return self.kernel.workspace_bytes + predictor + (0 if self.decode is None else self.decode.nbytes)

    @property
    def plan(self) -> SlotPlan:
        """How the budget is spent."""
        return self.memory.plan

    @property
    def budget(self) -> BudgetTracker:
        """Counts every byte of the budget."""
        return self.memory.budget

    def _limit(self, options: Options) -> int:
        return limit_in_bytes(self._expert_budget, self.experts, options, self._beside_experts, self._automatic_budget)

    def _plan(self, limit: int, options: Options, system: System) -> SlotPlan:
        shares = system.precision.all_shares(self.experts)
        filled = self.memory.device_side is not None
        beside, popularity = self._beside_experts, self._popularity
        return plan_slots(self.experts, options, system, limit, beside, shares, filled=filled, popularity=popularity)

    def _serve_with(self, options: Options, system: System) -> None:
        self.options, bits = options, {tier: tier_bits(options, tier) for tier in Tier}
        self.serving.choose_with(system, bits)
        self.memory.serve(system, bits)

    def _allocate(self, options: Options, system: System, plan: SlotPlan) -> None:
        """Serve with other slots; the old ones are gone, so that there is one arena at a time."""
        self.memory.allocate(
            plan, slot_bits(self.experts, options, system.precision.tiers), reuse_high=system.precision.reuses_high
        )
        self._serve_with(options, system)
        self.serving.begin()
        self.serving.migration = self._make_migration()

    def _make_migration(self) -> Migration | None:
        """None where steps fetch what they need: the system asks for that, or the budget cannot hold every expert."""
        migrating, held = self.system.residency.migrating, sum(self.plan.quotas.get(Tier.HI, ()))
        if migrating is None or not held:
            return None
        side = self.memory.device_side
        decoded = None if side is None else DecodeCounts(side.table)
        return Migration(
            self.memory, self.serving.fetcher, self.engine, migrating, self._popularity, self._agree, decoded
        )

    # -- seeing inside ----------------------------------------------------------------------------

    def start_timeline(self) -> None:
        """Take note of what runs when, from now on; what was noted before is dropped."""
        clock = HostClock() if self.device.type == "cpu" else CudaClock(self.device)
        self.engine.timeline = Timeline(clock)

    def stop_timeline(self, rank: int = 0) -> list[dict[str, Any]]:
        """What ran since ``start_timeline``, as Chrome trace events.

        Args:
            rank: the process that they are shown as.

        Raises:
            ValueError: nobody has started one.
        """
        timeline, self.engine.timeline = self.engine.timeline, None
        if timeline is None:
            raise ValueError("vllm-dymoe: no timeline was started; start one before what it is to show.")
        return timeline.events(rank)

    def stats(self) -> RuntimeStats:
        """Counts since the start or the last ``reset_stats``."""
        self._take_decode_counts()
        return RuntimeStats.collect(self.serving)

    def _take_decode_counts(self) -> None:
        if self.memory.device_side is not None:
            self.memory.read_device()
            self.memory.device_side.take_counts(self.serving.counts, self.engine.stats, self.serving.prefetch_stats)

    def precision(self) -> dict[str, Any]:
        """What decides precision at the moment, and what it means for a single token, as JSON-serialisable data."""
        options, layers = self.options, len(self.experts.layers)
        shares = self.system.precision.all_shares(self.experts)
        return {
            "system": self.system.name,
            "system_options": dict(options.system_options),
            "hi": options.hi,
            "lo": options.lo,
            "stored_bits": sorted(self.experts.formats, reverse=True),
            "share_of_tiers_in_decode": {tier.value: sum(shares[tier]) / layers for tier in Tier if tier in shares},
            "slots": {tier.value: count for tier, count in self.plan.slots.items()},
        }

    def reset_stats(self) -> None:
        """Count from zero."""
        self._take_decode_counts()
        self.serving.reset_stats()

    def release(self) -> HostStore:
        """End the transfer threads and give the slots' memory back; the store stays open, for a runtime after this."""
        self.engine.close()
        self.memory.pools.free()
        return self.store

    def close(self) -> None:
        """End the transfer threads and close the store."""
        self.engine.close()
        self.store.close()

    def check_integrity(self) -> None:
        """Between steps: nothing pinned, no slot lost, the budget kept.

        Raises:
            AssertionError: it is not so.
        """
        self.serving.fetcher.collect()
        self.memory.check_integrity((fetch.tier, fetch.slot, fetch.kept) for fetch in self.serving.on_their_way())
