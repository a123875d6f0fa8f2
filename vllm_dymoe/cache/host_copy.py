"""A device's numbers as the host reads them between steps."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class HostCopy:
    """A host copy of a device's int64 tensor, read without waiting for the device.

    All tensors that are copied have one shape. Until the first copy has ended the values are zeros.
    """

    def __init__(self, like: Tensor) -> None:
        on_gpu = like.device.type == "cuda"
        self._values = torch.zeros(like.shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)
        self._event = torch.cuda.Event() if on_gpu else None

    def ask(self, values: Tensor) -> None:
        """Start to copy the values, as they are after all enqueued steps."""
        self._values.copy_(values, non_blocking=True)
        if self._event is not None:
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the last copy has ended."""
        return self._event is None or self._event.query()

    def take(self) -> NDArray[np.int64]:
        """Return the values of the last copy, which has to be ready."""
        return self._values.numpy().copy()
