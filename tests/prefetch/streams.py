"""A side stream for predictions without a device."""

from vllm_dymoe.prefetch.side_stream import SideStream


class RecordedStream(SideStream):
    """Runs nothing before it is waited for; records its calls."""

    def __init__(self):
        self.copies, self.shared, self.waits, self.pending = [], [], 0, {}

    def copy_inputs(self, inputs):
        copies = [tensor.clone() for tensor in inputs]
        self.copies.append(copies)
        return copies

    def share(self, inputs):
        self.shared.append(inputs)
        return inputs

    def run(self, compute, inputs):
        answer = []
        self.pending[id(answer)] = (answer, compute, inputs)
        return answer, id(answer)

    def wait(self, event):
        self.waits += 1
        answer, compute, inputs = self.pending.pop(event)
        answer += compute(*inputs)
