"""Computes predictions while a layer's experts are computed.

This is the prediction stream of DuoServe-MoE 5.3. On CUDA predictions run on a stream of their own, whose answer the
host reads when the first experts have been enqueued. Elsewhere the same cores compute both in sequence, and waiting
gains nothing.
"""

from collections.abc import Callable, Sequence

import torch

Answer = tuple[torch.Tensor, ...]

MOST_ROWS = 512
"""Most tokens of a step for which gates are evaluated, evenly spaced. Their inputs are copied for the side stream;
copies of a whole prompt would take hundreds of MB, for which no budget has room.
"""


def some_rows(x: torch.Tensor) -> torch.Tensor:
    """Return a view of at most MOST_ROWS rows of x [tokens, hidden], evenly spaced."""
    return x[:: max(1, -(-len(x) // MOST_ROWS))]


def bytes_of_copies(copies: int, hidden: int) -> int:
    """Return the device memory of ``copies`` copies of a step's inputs, in 16 bits."""
    return copies * MOST_ROWS * hidden * 2


class Inline:
    """No stream: an answer is computed when it is read, if it is."""

    answers_later = False  # whether an answer should be read only after the layer's first experts have been enqueued

    def begin(
        self, compute: Callable[..., Answer], *inputs: torch.Tensor, lasting: bool = False
    ) -> Callable[[], Answer]:
        """Start to compute from tensors of the main stream, without waiting.

        Returns a function that returns the answer. Inputs may be overwritten afterwards, unless they are ``lasting``.
        """
        return lambda: compute(*inputs)


class SideStream(Inline):
    """A stream of low priority, so that experts are computed first.

    It runs after what the main stream was given. Memory of its inputs is not reused before it has read them; inputs
    that are not lasting are copied on the main stream first, because a replayed graph may write the next piece's values
    over them while this stream still reads.
    """

    answers_later = True

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

    def begin(
        self, compute: Callable[..., Answer], *inputs: torch.Tensor, lasting: bool = False
    ) -> Callable[[], Answer]:
        answer, event = self.run(compute, self.share(inputs) if lasting else self.copy_inputs(inputs))

        def read() -> Answer:
            self.wait(event)
            return answer

        return read


def make_side_stream(device: torch.device) -> Inline:
    return SideStream(device) if device.type == "cuda" else Inline()
