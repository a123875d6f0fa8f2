"""Refuse operations that a captured step must not use.

These read a value of the device, or copy between device and host.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_DATA_DEPENDENT = {
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.nonzero_static,
    _aten.masked_select,
    _aten.unique_dim,
    _aten.unique_consecutive,
    _aten._unique,
    _aten._unique2,
    _aten.equal,
    _aten.is_nonzero,
}


_INDEXED = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}


class HostInStepError(AssertionError):
    """A captured step would wait for the device, or replay a value of the capture."""


class NoHost(TorchDispatchMode):
    """Refuse, within the ``with`` block, operations that involve the host.

    These are operations whose result the host needs, and copies between device and host. Use tensors of the device
    "meta" in place of a real device: unlike with CPU tensors, copies to the host are then seen.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet, kwargs = function.overloadpacket, kwargs or {}
        if packet in _DATA_DEPENDENT:
            raise HostInStepError(f"{packet} waits for the device")
        if packet in _INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1]):
            raise HostInStepError(f"{packet} by a mask waits for the device")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # A host tensor without dimensions stands for a Python number and is passed by value.
        devices = {tensor.device.type for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
        if tensors and kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if len(devices) > 1:
            raise HostInStepError(f"{packet} moves values between {' and '.join(sorted(devices))}")
        return function(*args, **kwargs)
