"""Operations that a captured step must not use: reading a value of the device, or copying between device and host."""

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
    """Within the ``with`` block, refuse operations whose result the host needs, and copies between device and host.

    Tensors of the device "meta" replace those of a missing device: copies to the host are then seen, too, which do
    nothing for CPU tensors.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet, kwargs = function.overloadpacket, kwargs or {}
        if packet in _DATA_DEPENDENT:
            raise HostInStepError(f"{packet} waits for the device")
        if packet in _INDEXED and any(one is not None and one.dtype == torch.bool for one in args[1]):
            raise HostInStepError(f"{packet} by a mask waits for the device")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # A host tensor without dimensions is a Python number.
        devices = {tensor.device.type for tensor in tensors if tensor.dim() or tensor.device.type != "cpu"}
        if tensors and kwargs.get("device") is not None:
            devices.add(torch.device(kwargs["device"]).type)
        if len(devices) > 1:
            raise HostInStepError(f"{packet} moves values between {' and '.join(sorted(devices))}")
        return function(*args, **kwargs)
