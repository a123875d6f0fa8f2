"""CPU execution of one rank's misses: worker, rates and costs."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.cache.transfer import TransferEngine
from vllm_dymoe.executor.cpu_worker import CpuQueue, cpu_worker_threads, longest_wait, spins
from vllm_dymoe.executor.rates import Rates, costs, measure, measure_or_load
from vllm_dymoe.experts.format import ExpertFormat
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS, Cost
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.rule import HIGH, LOW

_ANY_ROWS = 1 << 30


class CpuExecution:
    """CPU execution of one rank's misses.

    Args:
        pin: pins memory for the device; returns the reason why that failed, or None.
        on_late: called with a message if the CPU has not answered the device in time.
        kept: file that stores the rates between starts; None to measure them every time.
        ends_long_kernels: the device has a display watchdog, so the wait for an answer must end before it.
        ranks: of this machine, which share its cores.

    Attributes:
        worker: computes concurrently with a device; None without a device, or if all misses are fetched.
        rates: of link and CPU, if misses are shared between them.

    Raises:
        ConfigError: there is no memory for the queue, or no native library.
    """

    def __init__(
        self, options: Options, store: HostStore, engine: TransferEngine, device: torch.device,
        pin: Callable[[Tensor], str | None], on_late: Callable[[str], None], kept: Path | None = None,
        *, ends_long_kernels: bool = False, ranks: int = 1,
    ) -> None:  # fmt: skip
        experts = store.experts
        self._options, self._experts, self._device = options, experts, device
        self.worker: CpuQueue | None = None
        self.rates: Rates | None = None
        if not options.computes_misses:
            return
        if not options.plain_cpu(device.type):
            timeout = longest_wait(options.transfer_timeout_s, ends_long_kernels=ends_long_kernels)
            how = cpu_worker_threads(device.type, ranks), timeout, options.activations
            spinning = spins(device.type, ranks)
            try:
                self.worker = CpuQueue(experts, SMALL_BATCH_ROWS, *how, device, pin, on_late, spins=spinning)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f'vllm-dymoe: misses = "{options.misses}" is impossible, because {error}; leave the option out.',
                    option="misses",
                ) from error
        self.rates = self._measured(store, engine, kept)

    def _measured(self, store: HostStore, engine: TransferEngine, kept: Path | None) -> Rates | None:
        """Return the rates by which misses are shared; None if they are not shared.

        They come from the file ``kept`` if that is valid for this machine and configuration.
        """
        worker, options = self.worker, self._options
        if options.misses != "share" or worker is None:
            return None
        place = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "this CPU"
        nbytes = [fmt.whole_nbytes for fmt in self._experts.all_formats]
        measured_for = (
            f"{place}, {worker.threads} threads, link {options.link_gbps or 'its own'}, experts of {nbytes} bytes, "
            f"activations of {options.activations} bits"
        )
        fmt = max(self._experts.all_formats, key=lambda fmt: fmt.nbytes)
        return measure_or_load(
            kept, measured_for, fmt, lambda: measure(store, engine, self._device, worker, measured_for)
        )

    def costs(self, served: Mapping[Precision, int]) -> NDArray[np.int64]:
        """Return ``Table.cpu_costs``, int64 [3, 4].

        Args:
            served: the bits of each precision that is served.
        """
        if not self._options.computes_misses:
            return np.zeros((3, len(Cost)), np.int64)
        by_precision = {HIGH: served[Precision.HIGH], LOW: served[Precision.LOW]}
        formats: dict[int, ExpertFormat | None] = dict.fromkeys(by_precision)
        for code, bits in by_precision.items():  # the largest: where layers differ the costs are one layer's
            of_kinds = [of_kind[bits] for of_kind in self._experts.of_kinds if bits in of_kind]
            formats[code] = max(of_kinds, key=lambda fmt: fmt.nbytes, default=None)
        most = _ANY_ROWS if self.worker is None else self._options.misses_rows
        return costs(formats, self.rates, most)

    def describe(self) -> str:
        """Describe in words how misses are executed; empty if all are fetched."""
        if not self._options.computes_misses:
            return ""
        if self.worker is None:
            return "misses are computed by the CPU"
        how = f"misses are computed by {self.worker.threads} CPU threads, concurrently with the device"
        if (rates := self.rates) is not None:
            how = f"misses are shared, as measured, between {rates.describe(self._experts)}"
        exact = (
            ""
            if self._device.type == "cpu"
            else "; answers' last bits depend on residency, as the CPU rounds differently"
        )
        return how + exact

    def close(self) -> None:
        """Stop the threads; no step may be running."""
        if self.worker is not None:
            self.worker.close()
