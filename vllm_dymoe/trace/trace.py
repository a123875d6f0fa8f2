"""Traces: the routing of each token, in memory and as files.

A trace is DuoServe-MoE's Eq. 1; files are in safetensors format (docs/traces.md).
"""

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from vllm_dymoe.durable import PRIVATE_MODE, replace_file
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace.gates import GateWeights

TRACE_FORMAT = 1
_KIND = "vllm-dymoe trace"


class TraceError(RuntimeError):
    """A trace cannot be read or used.

    The message is one sentence that names the file.
    """


def expert_dtype(num_experts: int) -> torch.dtype:
    return torch.uint8 if num_experts <= 256 else torch.int16


def columns(header: ModelIdentity, tokens: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of every tensor of a trace."""
    layers, top_k, expert = header.num_layers, header.top_k, expert_dtype(header.num_experts)
    return {
        "request": ((tokens,), torch.int32),
        "experts": ((tokens, layers, top_k), expert),
        "weights": ((tokens, layers, top_k), torch.float16),
        "position": ((tokens,), torch.int32),
        "prefill": ((tokens,), torch.bool),
        "router_inputs": ((tokens, layers, header.hidden), torch.float16),
        "next_gate": ((tokens, layers - 1, top_k), expert),
        "fates": ((tokens, layers, top_k), torch.uint8),
    }


@dataclass(frozen=True, eq=False)
class Trace:
    """Routing of tokens, in the order in which they were computed.

    A token that was computed twice, after a preemption or because a drafted token before it was wrong, occurs twice;
    ``by_request`` keeps the last one. Columns that were not recorded are None. Raises TraceError if tensors do not fit
    each other or the header.
    """

    header: ModelIdentity  # the model of the routers
    experts: torch.Tensor  # [tokens, layers, top_k] uint8, int16 above 256 experts; best first
    weights: torch.Tensor  # [tokens, layers, top_k] float16 routing weights
    request: torch.Tensor  # [tokens] int32, a running number from 0
    position: torch.Tensor  # [tokens] int32, in the request, its prompt included
    prefill: torch.Tensor  # [tokens] bool, whether the token is one of the prompt
    router_inputs: torch.Tensor | None = None  # [tokens, layers, hidden] float16
    next_gate: torch.Tensor | None = None
    """[tokens, layers - 1, top_k], like ``experts``: predictions of the next layer's gate from this layer's input."""
    fates: torch.Tensor | None = None  # [tokens, layers, top_k] uint8, see ``planner.rule.actions_of``
    gates: GateWeights | None = None  # of the model, with ``router_inputs``

    def __post_init__(self) -> None:
        header, tensors = self.header, self.tensors()
        tokens = self.request.shape[0] if self.request.dim() == 1 else -1
        for name, (shape, dtype) in columns(header, tokens).items():
            tensor = tensors.get(name)
            if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
                raise TraceError(
                    f"{name} are {tensor.dtype} {list(tensor.shape)}, but the header and other tensors need {dtype} "
                    f"{list(shape)}."
                )
        if tokens == 0:
            return
        for named in (self.experts, self.next_gate):
            for expert in () if named is None or not named.numel() else map(int, named.aminmax()):
                if not 0 <= expert < header.num_experts:
                    raise TraceError(f"an expert is {expert}, but a layer has {header.num_experts}.")
        if int(self.request.min()) < 0 or int(self.position.min()) < 0:
            raise TraceError("a request or position is negative.")
        if self.gates is not None:
            sizes = header.num_layers, header.num_experts, header.hidden
            shapes = tuple(self.gates.weights.shape), tuple(self.gates.biases.shape)
            if shapes != (sizes, sizes[:2]):
                raise TraceError(f"gates have the shapes {shapes[0]} and {shapes[1]}, but the header says {sizes}.")

    @property
    def num_tokens(self) -> int:
        return self.request.shape[0]

    @property
    def num_requests(self) -> int:
        return int(self.request.max()) + 1 if self.num_tokens else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors with a row for each token, by name."""
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in found if isinstance(value, torch.Tensor)}

    def in_order(self) -> torch.Tensor:
        """Return every token of every request once: int64 [different tokens].

        Tokens are ordered by request, then by position.
        """
        key = self.request.long() * (int(self.position.max()) + 1 if self.num_tokens else 1) + self.position
        order = key.argsort(stable=True)
        last = torch.ones_like(key, dtype=torch.bool)
        last[:-1] = key[order].diff() != 0
        return order[last]

    def by_request(self) -> Iterator[torch.Tensor]:
        """Yield the tokens of each request: int64 [tokens of the request].

        Each token comes once, in the order of positions.
        """
        order = self.in_order()
        _, counts = self.request[order].unique_consecutive(return_counts=True)
        yield from order.split(counts.tolist())

    def steps(self, batch: int) -> torch.Tensor:
        """Return the tokens of each step: int64 [steps, batch].

        Requests are served ``batch`` at a time.
        """
        requests = list(self.by_request())
        groups = [requests[first : first + batch] for first in range(0, len(requests) - batch + 1, batch)]
        together = [torch.stack([tokens[: min(map(len, group))] for tokens in group], 1) for group in groups]
        return torch.cat([torch.empty(0, batch, dtype=torch.long), *together])

    def select(self, tokens: torch.Tensor) -> "Trace":
        """Return the same trace with some of its tokens only.

        ``tokens`` is a mask or indices. Requests keep their numbers.
        """
        chosen: dict[str, Any] = {name: tensor[tokens] for name, tensor in self.tensors().items()}
        return replace(self, **chosen)

    def save(self, path: Path | str) -> None:
        """Write one file atomically; TraceError if it cannot be written."""
        constants = {} if self.gates is None else self.gates.tensors()
        write_file(Path(path), self.header, self.tensors() | constants)

    @classmethod
    def load(cls, path: Path | str) -> "Trace":
        """Read a file, or a folder of them, also while it is still being written to.

        TraceError if there is no token in it, a file is damaged or not a trace, or files are of different models.
        """
        path = Path(path)
        if not path.exists():
            raise TraceError(f"{path} does not exist; give a trace file, or the folder that was recorded to.")
        parts = [_read(part) for part in (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])]
        if not sum(part.trace.num_tokens for part in parts):
            raise TraceError(f"{path} holds no tokens; record some first, see docs/traces.md.")
        return _joined(parts)


def write_file(path: Path, header: ModelIdentity, tensors: Mapping[str, torch.Tensor], run: str = "") -> None:
    """Write one file atomically, readable by this user only.

    Tensors are named as in ``columns``; files of one ``run`` number their requests together. Raises TraceError if the
    file cannot be written.
    """
    metadata = {
        "kind": _KIND,
        "header": json.dumps(asdict(header) | {"format": TRACE_FORMAT}),
        "run": run,
    }
    try:
        content = save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata)
        replace_file(path, content, PRIVATE_MODE)
    except (OSError, SafetensorError) as error:
        raise TraceError(f"{path} cannot be written ({error}).") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[Any, Mapping[str, str], ModelIdentity]]:
    """Open a file of a trace; yield the file, its metadata and its model.

    Errors inside the context become a TraceError with the file's path.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            yield file, metadata, _header(path, metadata)
    except TraceError as error:
        raise error if str(path) in str(error) else TraceError(f"{path} is not a complete trace: {error}") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"{path} cannot be read as a trace ({reason}); it is truncated, damaged or another kind of file."
        ) from error


def _header(path: Path, metadata: Mapping[str, str]) -> ModelIdentity:
    if metadata.get("kind") != _KIND:
        raise TraceError(f"{path} is not a trace of vllm-dymoe.")
    described = json.loads(metadata["header"])
    if (version := described.pop("format", None)) != TRACE_FORMAT:
        raise TraceError(
            f"{path} has format {version}, but this vllm-dymoe reads {TRACE_FORMAT}; record it again, or use the "
            "version that wrote it."
        )
    header = ModelIdentity(**described)
    for field in fields(header):
        if type(value := getattr(header, field.name)) is not field.type:
            raise TypeError(f"{field.name} is {value!r}")
    return header


class _Part(NamedTuple):
    path: Path
    run: str
    trace: Trace


def _read(path: Path) -> _Part:
    with opened(path) as (file, metadata, header):
        names = {field.name for field in fields(Trace)}.intersection(file.keys())
        tensors: dict[str, Any] = {name: file.get_tensor(name) for name in names}
        constants = set(file.keys()) - {field.name for field in fields(Trace)}
        gates = GateWeights.of({name: file.get_tensor(name) for name in constants})
        return _Part(path, metadata["run"] or path.name, Trace(header, **tensors, gates=gates))


def _joined(parts: Sequence[_Part]) -> Trace:
    """Return one trace from several files.

    Each run's requests are numbered after those of the run before.
    """
    gates = next((part.trace.gates for part in parts if part.trace.gates is not None), None)
    if any(part.trace.router_inputs is not None and part.trace.next_gate is None for part in parts):
        gates = None  # they turned out to be wrong
    for name in ("next_gate", "fates"):  # missing if gates turned out to be wrong, and in older traces
        if any(getattr(part.trace, name) is None for part in parts):
            absent: dict[str, Any] = {name: None}
            parts = [part._replace(trace=replace(part.trace, **absent)) for part in parts]
    first = parts[0]
    for part in parts[1:]:
        if (header := part.trace.header) != first.trace.header:
            raise TraceError(
                f"{part.path} records {header.model}, fingerprint {header.fingerprint}, but {first.path.name} next to "
                "it records another model; keep the traces of each model in a folder of their own."
            )
        if part.trace.tensors().keys() != first.trace.tensors().keys():
            raise TraceError(
                f"{part.path} and {first.path.name} next to it have different tensors (router inputs on and off?); "
                "put them into folders of their own."
            )
    requests: list[torch.Tensor] = []
    before = 0
    for _, group in itertools.groupby(parts, key=lambda part: part.run):
        run = [part.trace for part in group]
        requests += [trace.request + before for trace in run]
        before += max(trace.num_requests for trace in run)
    named = [part.trace.tensors() for part in parts]
    tensors: dict[str, Any] = {name: torch.cat([found[name] for found in named]) for name in named[0]}
    tensors["request"] = torch.cat(requests)
    return Trace(first.trace.header, **tensors, gates=gates)
