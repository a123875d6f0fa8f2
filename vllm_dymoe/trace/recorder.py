"""Recording of routing while a model serves.

A step copies its routing on the device, and to the host when it ends, without waiting for the device or a disk. A
thread writes parts by size and by time. Whatever happens to the process, parts that have been written are complete.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_dymoe.durable import remove_given_up
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace.gates import GateWeights
from vllm_dymoe.trace.trace import TraceError, columns, opened, write_file
from vllm_dymoe.units import size

_ROOM = 8192  # bytes of a part in addition to tokens


class Span(NamedTuple):
    """Tokens of a step that belong to one request, in order."""

    request: int  # its number
    tokens: int
    prompt: int  # number of tokens of its whole prompt


@dataclass
class _Step:
    """The tensors of one step, on the device until it ends, then on the host."""

    tokens: int = 0
    number: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: dict[str, Sequence[torch.Tensor]] = field(default_factory=dict)  # views of the same, by layer
    recorded: int = 0
    spans: Sequence[Span] = ()
    copied: torch.cuda.Event | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values()) + 5 * self.tokens


class Recorder:
    """Writes the routing of every step into a folder, up to a size.

    Recording ends when the folder has ``limit`` bytes, including its earlier content. Raises TraceError if the folder
    cannot be written to, or contains traces of another kind.
    """

    def __init__(
        self,
        folder: Path,
        header: ModelIdentity,
        limit: int,
        *,
        inputs: bool = False,  # also record the routers' inputs, and the next gates' predictions from them
        say: Callable[[str], None] = print,  # takes one sentence for the log
        part_bytes: int = 4 * 2**20,
        interval: float = 10.0,
    ) -> None:
        self.folder, self.header = folder, header
        self.recording = True
        self.tokens = 0
        self.inputs = inputs
        self._limit, self._say = limit, say
        self._part_bytes, self._interval = part_bytes, interval
        self._prepare()
        self._run = f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 10**6:06d}"
        self._parts = 0
        self._step: _Step | None = None
        self._gates: GateWeights | None = None  # for the next part
        self._pending: list[_Step] = []
        self._pending_bytes = 0
        self._closing = False
        self._changed = threading.Condition()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._write_parts, name="vllm-dymoe trace", daemon=True)
        self._thread.start()
        # vLLM's workers are children of multiprocessing, which does not call atexit's functions when they end.
        self._at_exit = Finalize(self, self.close, exitpriority=10)

    def begin(self) -> None:
        """Begin a step; one that has not ended is dropped."""
        self._step = _Step() if self.recording else None

    def record(self, layer: int, experts: torch.Tensor, **others: torch.Tensor | None) -> None:
        """Copy a layer's routing: columns of a trace, by name.

        ``experts`` are expert ids over all ranks. The first layer determines which columns a step has.
        """
        step = self._step
        if step is None:
            return
        if not step.layers:
            step.tokens = experts.shape[0]
            self._allocate(step, experts.device, {name for name, column in others.items() if column is not None})
        if experts.shape[0] != step.tokens:  # the step was split, and it is unknown which part this is
            self._step = None
            return
        values = {"experts": experts, **others}
        for name, layers in step.layers.items():
            if (value := values.get(name)) is not None:
                layers[layer].copy_(value)
        step.recorded += 1

    def end(self, spans: Sequence[Span], position: torch.Tensor, number: int = 0, *, next_gate: bool = True) -> None:
        """End the step of this number; it counts if every layer was recorded once.

        ``position``, int [tokens or more], may be overwritten afterwards. Without ``next_gate`` the gates turned out to
        be wrong, and their predictions are left out.
        """
        step, self._step = self._step, None
        if step is None or step.recorded != self.header.num_layers or sum(s.tokens for s in spans) != step.tokens:
            return
        step.spans, step.number, step.layers = spans, number, {}
        if not next_gate:
            step.tensors.pop("next_gate", None)
        step.tensors["position"] = position[: step.tokens].to(torch.int32, copy=True)
        if step.tensors["experts"].is_cuda:
            for name, tensor in step.tensors.items():  # complete when the stream reaches this point
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                step.tensors[name] = host.copy_(tensor, non_blocking=True)
            step.copied = torch.cuda.Event()
            step.copied.record()
        with self._changed:
            self._pending.append(step)
            self._pending_bytes += step.nbytes
            if self._pending_bytes >= self._part_bytes:
                self._changed.notify()

    def take_gates(self, gates: GateWeights) -> None:
        """Write the model's gates with the next part.

        A predictor is trained from them; writing them once is enough.
        """
        if self.inputs:
            self._gates = gates

    def forget(self, number: int) -> None:
        """Drop a step, unless it is on disk already."""
        with self._changed:
            self._pending = [step for step in self._pending if step.number != number]
            self._pending_bytes = sum(step.nbytes for step in self._pending)

    def flush(self) -> None:
        """Write what has been recorded, so that it can be read."""
        with self._writing:
            with self._changed:
                steps, self._pending, self._pending_bytes = self._pending, [], 0
            if steps and self.recording:
                try:
                    self._write(steps)
                except (OSError, TraceError) as error:
                    self._stop(f"recording of the trace has stopped: {error}")

    def close(self) -> None:
        """Write what has been recorded, and stop the thread and the recording."""
        self._at_exit.cancel()  # it keeps this recorder alive
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=30)
        self.flush()
        self.recording = False

    @property
    def nbytes(self) -> int:
        return sum(entry.stat().st_size for entry in os.scandir(self.folder) if entry.is_file())

    def _write_parts(self) -> None:
        while not self._closing:
            with self._changed:
                if self._pending_bytes < self._part_bytes and not self._closing:
                    self._changed.wait(self._interval)
            self.flush()

    def _write(self, steps: Sequence[_Step]) -> None:
        for step in steps:
            if step.copied is not None:
                step.copied.synchronize()
        names = set.intersection(*(set(step.tensors) for step in steps))
        tensors = {name: torch.cat([step.tensors[name] for step in steps]) for name in names}
        spans = torch.tensor([span for step in steps for span in step.spans], dtype=torch.int32)
        request, prompt = spans[:, ::2].repeat_interleave(spans[:, 1], dim=0).T
        tensors |= {"request": request, "prefill": tensors["position"] < prompt}
        tokens = len(request)
        constants = {} if self._gates is None else self._gates.tensors()
        room = self._limit - self.nbytes - _ROOM - sum(tensor.nbytes for tensor in constants.values())
        fitting = max(0, room) // (sum(tensor.nbytes for tensor in tensors.values()) // tokens)
        if fitting:
            self._parts += 1
            tensors = {name: tensor[:fitting] for name, tensor in tensors.items()}
            path = self.folder / f"routing-{self._run}-{self._parts:06d}.safetensors"
            write_file(path, self.header, tensors | constants, self._run)
            self._gates = None
            self.tokens += min(tokens, fitting)
        if fitting < tokens:
            self._stop(f"{self.folder} has reached its limit, {size(self._limit)}; recording of routing has stopped.")

    def _stop(self, sentence: str) -> None:
        self.recording = False
        self._step = None
        self._say(sentence)

    def _allocate(self, step: _Step, device: torch.device, given: Set[str]) -> None:
        wanted = {"experts", *given} - (set() if self.inputs else {"router_inputs", "next_gate"})
        for name, (shape, dtype) in columns(self.header, step.tokens).items():
            if name in wanted:
                step.tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        step.layers = {name: tensor.unbind(1) for name, tensor in step.tensors.items()}

    def _prepare(self) -> None:
        """Create the folder, and check that its content is compatible."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TraceError(f"trace folder {self.folder} cannot be created ({error.strerror}).") from error
        if not os.access(self.folder, os.W_OK):
            raise TraceError(f"trace folder {self.folder} cannot be written to.")
        remove_given_up(self.folder, "routing-*.safetensors")
        for path in sorted(self.folder.glob("*.safetensors"))[:1]:
            with opened(path) as (file, _, header):
                inputs = "router_inputs" in file.keys()  # noqa: SIM118 - it is no dictionary
            if header != self.header or inputs != self.inputs:
                raise TraceError(
                    f"trace folder {self.folder} has a trace of another model or with other tensors ({path.name}, of "
                    f"{header.model}); name another folder."
                )
