"""Pinned memory, which a device's copy engine reads directly."""

import contextlib
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.cache.pages import several_nodes

_PCI_DEVICES = Path("/sys/bus/pci/devices")
# cudaHostRegisterPortable: for every context. cudaHostRegisterMapped: kernels can read it, too.
_PORTABLE_AND_MAPPED = 1 | 2


class CudaPinner:
    """Pins host memory for one device, with ``cudaHostRegister``.

    Attributes:
        node: the NUMA node nearest to the device; None if there is only one, or if the system reports none.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = torch.cuda.cudart()
        properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack some of its attributes
        place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        self.node = node_of(place)

    def pin(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages; return the reason why pinning failed, or None."""
        with torch.cuda.device(self._device):
            code = self._runtime.cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
        if int(code) == 0:
            return None
        self._clear_error()
        return f"CUDA error {int(code)}: {self._runtime.cudaGetErrorString(code)}"

    def unpin(self, address: int) -> None:
        """Undo ``pin``, once the device no longer reads."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if int(self._runtime.cudaHostUnregister(address)) != 0:
                self._clear_error()

    def _clear_error(self) -> None:
        """Clear CUDA's error with a launch of our own.

        Otherwise the next launch would report it again.
        """
        with contextlib.suppress(RuntimeError):
            torch.ones(1, dtype=torch.float32, device=self._device)


def node_of(pci_address: str) -> int | None:
    """Return the NUMA node of a PCI device.

    None if there is only one, or if the system reports none.
    """
    if not several_nodes():
        return None
    try:
        node = int((_PCI_DEVICES / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
