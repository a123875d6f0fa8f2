"""Run code that is written for a card on machines without one."""

import torch
from torch.overrides import TorchFunctionMode


class OnTheHost(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.pin_memory:
            return args[0]
        if function is torch.device:  # names are not tensors
            return function(*args, **(kwargs or {}))
        named = {name: _on_the_host(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return function(*map(_on_the_host, args), **named)


def _on_the_host(value):
    card = isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda"
    return torch.device("cpu") if card else value
