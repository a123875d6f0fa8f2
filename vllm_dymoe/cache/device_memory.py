"""How much memory the experts' device has left, and giving back what is held without use."""

import ctypes

import torch

from vllm_dymoe.cache.pages import available_host_memory

_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91  # of cuda.h's CUdevice_attribute


class DeviceMemory:
    """Memory of one device: here of a CPU, where slots are in host memory."""

    def available(self) -> int:
        """Bytes that any process can allocate now; what this process holds without use has been given back."""
        # Small blocks that were freed stay in the C library's heap otherwise; not every C library has the call.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        return available_host_memory()

    def computation(self) -> int:
        """Bytes that a step has taken at its peak, beyond what is held between steps: little beside a host's memory."""
        return 0

    def shares_addresses(self) -> bool:
        """Whether the device reads pinned host memory at the address that the host has for it."""
        return True


class CudaMemory(DeviceMemory):
    """Of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def available(self) -> int:
        """What the driver has left once torch has given back the blocks that it keeps for later. Blocks of captured
        graphs stay: they are in use whenever the graphs are."""
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info(self._device)[0])

    def computation(self) -> int:
        """Torch's highest use so far beyond the present one; vLLM counts on it for activations."""
        return torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)

    def shares_addresses(self) -> bool:
        """What the driver says of memory that ``cudaHostRegister`` locked; no if it says nothing."""
        answer, device = ctypes.c_int(0), torch.cuda.device(self._device).idx
        try:
            failed = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute(
                ctypes.byref(answer), _CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, device
            )
        except (OSError, AttributeError):
            return False
        return not failed and bool(answer.value)


def make_device_memory(device: torch.device) -> DeviceMemory:
    return CudaMemory(device) if device.type == "cuda" else DeviceMemory()
