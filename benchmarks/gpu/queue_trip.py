"""How long is an empty round trip to the CPU queue? No GPU is needed.

It depends on the time since the last one: a device waits for the answers of each layer, and computes something else
between two layers. Threads that sleep meanwhile have to be woken; threads that spin (with at least 8 cores for a rank)
do not. The numbers do not include a device's own access over PCIe.
"""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))  # an installed package takes precedence

from layers import LAYERS

from vllm_dymoe.cgroups import usable_cores
from vllm_dymoe.executor.cpu_worker import CpuQueue

PAUSES_US = 0, 100, 500, 2000, 10000


def main() -> None:
    """Print a table."""
    experts = LAYERS[1].at((4,))
    print(f"{usable_cores()} cores; microseconds of an empty round trip, the median of 256")
    print("busy before it      sleeping  spinning")
    for pause in PAUSES_US:
        times = []
        for spins in (False, True):
            queue = CpuQueue(experts, 16, 1, 20.0, 16, torch.device("cpu"), spins=spins)
            times.append(1e6 * queue.round_trip(pause / 1e6))
        print(f"{pause:8} us      {times[0]:10.1f} {times[1]:9.1f}")


if __name__ == "__main__":
    main()
