"""The slots of a rank: one pool for each tier, whose memory is there as long as they are."""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_dymoe.config import ConfigError
from vllm_dymoe.residency.format import Format
from vllm_dymoe.residency.slots import SlotPool
from vllm_dymoe.residency.tier import Tier
from vllm_dymoe.runtime.device_memory import DeviceMemory
from vllm_dymoe.runtime.sizing import SlotPlan


class SlotPools(dict[Tier, SlotPool]):
    """Slots by tier, the high one first."""

    def __init__(self, device: torch.device, device_memory: DeviceMemory) -> None:
        super().__init__()
        self._device, self._device_memory = device, device_memory
        self._where = "host" if device.type == "cpu" else "device"  # in messages

    def make(self, tier: Tier, fmt: Format, count: int, promised: int) -> None:
        """Add slots whose memory is there from now on; ConfigError if something else has taken it already."""
        nbytes, available = count * fmt.nbytes, self._device_memory.available()
        if available < nbytes:
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes for {count} slots, but {available} bytes of "
                f"{self._where} memory are available; lower expert_budget, or end what else takes memory."
            )
        try:
            self[tier] = SlotPool(fmt, count, self._device, promised)
        except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError among them
            raise ConfigError(
                f"vllm-dymoe: expert_budget needs {nbytes} bytes of {self._where} memory for {count} slots, which "
                f"could not be had ({str(error).splitlines()[0]}); lower expert_budget or gpu_memory_utilization, or "
                "end what else takes memory."
            ) from error

    def fence(self, filled: Any) -> None:
        for pool in self.values():
            pool.fence(filled)

    @property
    def available(self) -> int:
        return self._device_memory.available()

    def free(self) -> None:
        for pool in self.values():
            pool.close()
        self.clear()
        self._device_memory.available()

    def check_growth(self, plan: SlotPlan, before: SlotPlan, formats: Mapping[Tier, Format]) -> None:
        """ConfigError for more slots than fit beside what computation takes; the old ones are still there."""
        if plan.limit <= before.limit:  # the device has given as much before
            return
        wanted = sum(count * formats[tier].nbytes for tier, count in plan.slots.items())
        held = sum(pool.nbytes for pool in self.values())
        available, computation = self._device_memory.available(), self._device_memory.computation()
        room = held + max(0, available - computation)
        if wanted > room:
            raise ConfigError(
                f"vllm-dymoe: {sum(plan.slots.values())} slots would take {wanted} bytes of {self._where} memory; now "
                f"they take {held}, {available} are free, and computation needs {computation} of these; set "
                f"expert_budget to at most {room + plan.workspace_bytes} bytes."
            )
