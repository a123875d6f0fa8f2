"""Memory that is locked for a device, so that its copy engine reads it by itself."""

import contextlib
import weakref

import torch

from vllm_dymoe.host_memory import map_bytes, whole_pages
from vllm_dymoe.store.shared import SharedMemory

# cudaHostRegisterPortable: for every context. cudaHostRegisterMapped: kernels can read it, too.
_PORTABLE_AND_MAPPED = 1 | 2


class CudaPageLock:
    """Locks host memory for one device, by ``cudaHostRegister``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime = torch.cuda.cudart()

    def lock(self, address: int, nbytes: int) -> str | None:
        """Lock whole pages. Returns what is in the way, or None."""
        with torch.cuda.device(self._device):
            code = self._runtime.cudaHostRegister(address, nbytes, _PORTABLE_AND_MAPPED)
        if int(code) == 0:
            return None
        self._clear_error()
        return f"CUDA error {int(code)}: {self._runtime.cudaGetErrorString(code)}"

    def unlock(self, address: int) -> None:
        """Undo ``lock``, once the device no longer reads."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            if int(self._runtime.cudaHostUnregister(address)) != 0:
                self._clear_error()

    def _clear_error(self) -> None:
        """CUDA reports the error again at the next launch; a launch of our own takes it."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)


class Arena:
    """A mapping, ``memory`` uint8 [nbytes], a part of ``shared`` if other processes map the same, that can be locked
    for a device; OSError if impossible."""

    def __init__(self, nbytes: int, page_lock: CudaPageLock | None, shared: SharedMemory | None = None) -> None:
        self.memory = map_bytes(nbytes) if shared is None else shared.map(nbytes, locked=page_lock is not None)
        self._page_lock = page_lock
        self._unlock: weakref.finalize[[int], Arena] | None = None

    def lock(self) -> str | None:
        """Lock it, once its pages are there. Returns what is in the way, or None."""
        if self._page_lock is None or self.memory.numel() == 0:
            return None
        address = self.memory.data_ptr()
        reason = self._page_lock.lock(address, whole_pages(self.memory.numel()))
        if reason is None:
            self._unlock = weakref.finalize(self, self._page_lock.unlock, address)
            self._unlock.atexit = False  # a process that ends leaves it to the system
        return reason

    def close(self) -> None:
        """Unlock it; the memory itself goes with the last tensor over it."""
        if self._unlock is not None:
            self._unlock()
        self.memory = torch.empty(0, dtype=torch.uint8)
