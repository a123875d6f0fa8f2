"""A stream of the device for predictions, without a device."""

import torch


class RecordedStream:
    """A stream on which nothing happens before somebody waits for it, and what was asked of it."""

    def __init__(self):
        self.copies, self.waits, self.pending = [], 0, {}

    def copy_inputs(self, inputs):
        copies = [tensor.clone() for tensor in inputs]
        self.copies.append(copies)
        return copies

    def run(self, compute, inputs):
        answer = torch.full((1, 2), -7), torch.full((1, 2), -7.0)
        self.pending[id(answer)] = (answer, compute, inputs)
        return answer, id(answer)

    def wait(self, event):
        self.waits += 1
        answer, compute, inputs = self.pending.pop(event)
        for place, part in zip(answer, compute(*inputs), strict=True):
            place.resize_(part.shape).copy_(part)
