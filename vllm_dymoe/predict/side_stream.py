"""Computing a prediction while the layer's experts are computed (DuoServe-MoE 5.3, the prediction stream).

On CUDA the network runs on a stream of its own: the host enqueues it, then the layer's experts, and reads the answer
when the first of them has been enqueued. Elsewhere the cores that compute experts compute predictions, one after the
other, and nothing is gained by waiting.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Answer = tuple[torch.Tensor, ...]


class Inline:
    """No stream: an answer is computed when it is asked for, which need not be.

    Attributes:
        answers_later: an answer is better asked for after the layer's first experts have been enqueued.
    """

    answers_later = False

    def begin(
        self, compute: Callable[..., Answer], *inputs: torch.Tensor, lasting: bool = False
    ) -> Callable[[], Answer]:
        """Compute with tensors of the main stream; what is returned gives the answer, on the host.

        Args:
            compute: from inputs to answer; it must not wait for the device.
            inputs: for it.
            lasting: the inputs are not overwritten.
        """
        return lambda: compute(*inputs)


class Stream(Protocol):
    """What a prediction needs of a CUDA stream."""

    def copy_inputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Copies on the main stream, whose memory is not given away before this stream has read them."""
        ...

    def share(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The inputs, whose memory is not given away before this stream has read them."""
        ...

    def run(self, compute: Callable[..., Answer], inputs: Sequence[torch.Tensor]) -> tuple[Answer, Any]:
        """Enqueue a computation behind the main stream's; answer on the host, and the event behind it."""
        ...

    def wait(self, event: Any) -> None:
        """Block the host until the event."""
        ...


class OnStream(Inline):
    """Computed on a stream of its own.

    Inputs that do not last are copied on the main stream first: a graph that is replayed may write the next piece's
    values over them while this stream still reads.
    """

    answers_later = True

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def begin(
        self, compute: Callable[..., Answer], *inputs: torch.Tensor, lasting: bool = False
    ) -> Callable[[], Answer]:
        own = self.stream.share(inputs) if lasting else self.stream.copy_inputs(inputs)
        answer, event = self.stream.run(compute, own)

        def read() -> Answer:
            self.stream.wait(event)
            return answer

        return read


class CudaStream:
    """A stream of low priority: experts that are computed go first."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=0)

    def copy_inputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self.share([tensor.clone() for tensor in inputs])

    def share(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        for tensor in inputs:
            tensor.record_stream(self._stream)
        return inputs

    def run(self, compute: Callable[..., Answer], inputs: Sequence[torch.Tensor]) -> tuple[Answer, torch.cuda.Event]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            found = compute(*inputs)
            answer = tuple(torch.empty_like(part, device="cpu", pin_memory=True) for part in found)
            for host, part in zip(answer, found, strict=True):
                host.copy_(part, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return answer, event

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()


def make_side_stream(device: torch.device) -> Inline:
    """A stream where the device has streams."""
    return OnStream(CudaStream(device)) if device.type == "cuda" else Inline()
