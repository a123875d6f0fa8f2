"""What memory and link reach on this machine, as bounds for everything else; ``python -m`` this module prints JSON."""

import json
import time
from collections.abc import Callable

import torch

_BYTES = 256 << 20
_TRIES = 5


def measure() -> dict[str, float | str]:
    """Bytes per second of reading device memory, and of copies from host to device."""
    if not torch.cuda.is_available():
        source, target = torch.ones(_BYTES // 4), torch.empty(_BYTES, dtype=torch.uint8)
        return {
            "device": "cpu",
            "memory_bytes_per_second": _BYTES / _fastest(lambda: source.sum()),
            "link_bytes_per_second": _BYTES / _fastest(lambda: target.copy_(source.view(torch.uint8))),
        }
    host = torch.ones(_BYTES, dtype=torch.uint8).pin_memory()
    device, other = torch.empty(4 * _BYTES, dtype=torch.uint8, device="cuda"), host.cuda()

    def run(action: Callable[[], object]) -> Callable[[], object]:
        def finished() -> None:
            action()
            torch.cuda.synchronize()

        return finished

    return {
        "device": torch.cuda.get_device_name(),
        "memory_bytes_per_second": 4 * _BYTES / _fastest(run(lambda: device.view(torch.float32).sum())),
        "link_bytes_per_second": _BYTES / _fastest(run(lambda: other.copy_(host, non_blocking=True))),
    }


def _fastest(action: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps(measure()))
