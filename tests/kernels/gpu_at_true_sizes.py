"""Measure like `make gpu` and `make bench-gpu` at true sizes, without computing.

    python tests/kernels/gpu_at_true_sizes.py FOLDER [few] speeds|decode|prompts|layers ...

The host replaces the card, and memory is mapped but not written, so only the host's own work remains. FOLDER receives
the results of each part; the times of prompts are the host's time per layer. Device numbers mean nothing. With `few` a
model has few experts of true size: creating views of a thousand slots for each of twenty servers takes minutes, but the
host's times are those for 128.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "gpu"), str(ROOT)]

import torch  # noqa: E402

from tests.kernels import host_card  # noqa: E402

torch.set_num_threads(1)
MODE = host_card.put_in_place()

import kernel_speeds  # noqa: E402
from parts import decode, prompts, speeds  # noqa: E402
from record import Recorder  # noqa: E402

from tests.support.memory_writer import MemoryStore  # noqa: E402
from tests.support.no_launches import no_launches  # noqa: E402
from vllm_dymoe.executor import cpu_execution  # noqa: E402
from vllm_dymoe.executor.large_batch import LargeBatches  # noqa: E402
from vllm_dymoe.prefetch import on_device  # noqa: E402

LARGE = 1 << 16
"""A tensor whose elements are left uninitialized."""
HOST: list[float] = []
"""Host seconds of each layer since the last measurement."""


class OfTheHost(Recorder):
    """Report the host's time for a layer instead of the whole step's."""

    def speed(self, name, unit, measured, bound, share, remark=""):
        super().speed(name, unit, 1e6 * median(HOST) if HOST else measured, bound, share, remark)
        HOST.clear()


def unless_large(method):
    return lambda tensor, *rest, **named: tensor if tensor.numel() > LARGE else method(tensor, *rest, **named)


def timed(method):
    def call(*arguments, **named):
        begin = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            HOST.append(time.perf_counter() - begin)

    return call


torch.cuda.mem_get_info = lambda *device: (64 << 30, 80 << 30)
for name in ("normal_", "uniform_", "mul_", "copy_"):
    setattr(torch.Tensor, name, unless_large(getattr(torch.Tensor, name)))
torch.randint = lambda low, high, size, dtype=torch.int64, **rest: torch.empty(size, dtype=dtype)
torch.mm = lambda a, b: a
kernel_speeds.ProcessPoolExecutor = decode.ProcessPoolExecutor = host_card.Inline
decode.check = decode.check_alone = lambda launch: []  # launches do nothing, so their results are not checked
kernel_speeds.seconds.__defaults__ = (0.0,)
speeds.pinned_store = decode.pinned_store = prompts.pinned_store = lambda model, bits: MemoryStore(model.at(bits))
kernel_speeds.TOKENS = kernel_speeds.TOKENS[::3]
if "few" in sys.argv:
    speeds.MODEL = decode.MODEL = prompts.MODEL = replace(speeds.MODEL, layers=2, experts=16)
cpu_execution.measure = partial(cpu_execution.measure, seconds=0.0)
speeds.STEPS, speeds.WARM = {phase: (tokens, 4) for phase, (tokens, _) in speeds.STEPS.items()}, 8
decode.STEPS_MEASURED = 4
prompts.LARGE_STEPS, prompts.DECODE_STEPS = 2, 3
LargeBatches.forward = timed(LargeBatches.forward)
speeds.same_bits = lambda one, other: True
decode._different = lambda *given: []
on_device._name_experts_on = lambda device: lambda *arguments: None  # replaces a launch

if __name__ == "__main__":
    parts = {"speeds": speeds, "decode": decode, "prompts": prompts, "layers": kernel_speeds}
    for part in (word for word in sys.argv[2:] if word in parts):
        recorder = OfTheHost(Path(sys.argv[1]) / f"{part}.jsonl")
        with no_launches():
            parts[part].run(recorder)
        recorder.end()
