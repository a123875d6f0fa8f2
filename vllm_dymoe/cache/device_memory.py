"""Free memory of the experts' device.

Reports how much is left, and gives back what is unused.
"""

import ctypes

import torch

from vllm_dymoe.cache.pages import available_host_memory

# A CUdevice_attribute of cuda.h.
_KERNEL_EXEC_TIMEOUT = 17
_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91


class DeviceMemory:
    """Memory of one device; this class is for a CPU, where slots are in host memory."""

    def available(self) -> int:
        """Return the bytes that any process can allocate now.

        Memory that this process holds without use is given back first.
        """
        # Small blocks that were freed stay in the C library's heap otherwise; not every C library has the call.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        return available_host_memory()

    def computation(self) -> int:
        """Return the peak bytes of a step beyond what is held between steps.

        On a CPU this counts as 0, because it is little compared with a host's memory.
        """
        return 0

    def shares_addresses(self) -> bool:
        """Return whether the device reads pinned host memory at the host's address."""
        return True

    def ends_long_kernels(self) -> bool:
        """Return whether a display watchdog ends kernels after some seconds.

        That also destroys the process's CUDA context.
        """
        return False


class CudaMemory(DeviceMemory):
    """Memory of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        """Return what the driver has left once torch has given back cached blocks.

        Blocks of captured graphs stay: they are in use whenever the graphs are.
        """
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self._device)[0])

    def computation(self) -> int:
        """Return torch's highest use so far beyond the present one.

        vLLM counts on this memory for activations.
        """
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)

    def shares_addresses(self) -> bool:
        """Return what the driver says; False if it says nothing."""
        return self._attribute(_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) == 1

    def ends_long_kernels(self) -> bool:
        """Return what the driver says; False if it says nothing."""
        return self._attribute(_KERNEL_EXEC_TIMEOUT) == 1

    def _attribute(self, number: int) -> int | None:
        answer, device = ctypes.c_int(0), torch.cuda.device(self._device).idx
        try:
            failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(ctypes.byref(answer), number, device)
        except (OSError, AttributeError):
            return None
        return None if failed else answer.value


def make_device_memory(device: torch.device) -> DeviceMemory:
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory()
