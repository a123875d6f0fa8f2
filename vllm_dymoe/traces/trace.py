"""A trace in memory: what routers chose for each token (DuoServe-MoE Eq. 1)."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.traces.files import TraceError, TraceHeader, expert_dtype, read_file, reading, write_file


@dataclass(frozen=True, eq=False)
class Trace:
    """Tokens in the order in which they were computed.

    A token that was computed twice, after a preemption or because a drafted one before it was wrong, is there twice;
    ``by_request`` keeps the last of them.

    Attributes:
        header: whose routers they are.
        experts: [tokens, layers, top_k] uint8, int16 above 256 experts; in the order that the router gave, best first.
        weights: [tokens, layers, top_k] float16 routing weights.
        request: [tokens] int32, a running number from 0.
        position: [tokens] int32, in the request, its prompt included.
        prefill: [tokens] bool, whether the token is one of the prompt.
        router_inputs: [tokens, layers, hidden] float16; None if they were not recorded.
        next_gate: [tokens, layers - 1, top_k], as ``experts``: what the next layer's gate makes of this layer's input,
            best first; None if it was not recorded.
        heavy: [tokens, layers] bool, whether a prompt's token is a heavy hitter in a layer (DyMoE 4.2); None unless the
            system that served asks for them.
        domain: a name for each request, empty where none was given; None if no request has one.

    Raises:
        TraceError: the tensors do not fit each other or the header.
    """

    header: TraceHeader
    experts: torch.Tensor
    weights: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor
    prefill: torch.Tensor
    router_inputs: torch.Tensor | None = None
    next_gate: torch.Tensor | None = None
    heavy: torch.Tensor | None = None
    domain: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        header, tokens = self.header, self.request.shape[0] if self.request.dim() == 1 else -1
        choices = (tokens, header.num_layers, header.top_k)
        expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "request": ((tokens,), torch.int32),
            "experts": (choices, expert_dtype(header.num_experts)),
            "weights": (choices, torch.float16),
            "position": ((tokens,), torch.int32),
            "prefill": ((tokens,), torch.bool),
        }
        if self.router_inputs is not None:
            expected["router_inputs"] = ((tokens, header.num_layers, header.hidden), torch.float16)
        if self.next_gate is not None:
            expected["next_gate"] = ((tokens, header.num_layers - 1, header.top_k), expert_dtype(header.num_experts))
        if self.heavy is not None:
            expected["heavy"] = ((tokens, header.num_layers), torch.bool)
        for name, (shape, dtype) in expected.items():
            tensor = getattr(self, name)
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise TraceError(
                    f"{name} are {_kind(tensor.dtype)} {list(tensor.shape)} where the header and other tensors need "
                    f"{_kind(dtype)} {list(shape)}."
                )
        if tokens == 0:
            return
        for named in (self.experts, self.next_gate):
            if named is None or not named.numel():
                continue
            for expert in (int(named.max()), int(named.min())):
                if not 0 <= expert < header.num_experts:
                    raise TraceError(f"an expert is {expert} where a layer has {header.num_experts}.")
        if int(self.request.min()) < 0 or int(self.position.min()) < 0:
            raise TraceError("a request or position is negative.")
        if self.domain is not None and len(self.domain) <= int(self.request.max()):
            raise TraceError(f"there are {len(self.domain)} domains for {int(self.request.max()) + 1} requests.")

    @property
    def num_tokens(self) -> int:
        """Tokens, those that were computed twice twice."""
        return self.request.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests."""
        return int(self.request.max()) + 1 if self.num_tokens else 0

    def in_order(self) -> torch.Tensor:
        """Every token of every request once, by request and position: int64 [tokens that are different]."""
        key = self.request.long() * (int(self.position.max()) + 1 if self.num_tokens else 1) + self.position
        order = key.argsort(stable=True)
        key = key[order]
        last = torch.ones_like(key, dtype=torch.bool)
        last[:-1] = key[1:] != key[:-1]
        return order[last]

    def by_request(self) -> Iterator[torch.Tensor]:
        """The tokens of each request in the order of their positions, each once: int64 [tokens of the request]."""
        order = self.in_order()
        _, counts = self.request[order].unique_consecutive(return_counts=True)
        yield from order.split(counts.tolist())

    def select(self, tokens: torch.Tensor) -> "Trace":
        """The same trace with some of its tokens, as a mask or as indices; requests keep their numbers."""
        chosen: dict[str, Any] = {name: tensor[tokens] for name, tensor in self._tensors().items()}
        return replace(self, **chosen)

    def save(self, path: Path | str) -> None:
        """Write one file, which is there whole or not at all.

        Raises:
            TraceError: it cannot be written.
        """
        names = {number: name for number, name in enumerate(self.domain or ()) if name}
        write_file(Path(path), self.header, self._tensors(), names)

    @classmethod
    def load(cls, path: Path | str) -> "Trace":
        """Read a file, or a folder of them, also while it is still being written to.

        Raises:
            TraceError: there is no token in it, a file is damaged or not a trace, or files are of different models.
        """
        path = Path(path)
        if path.is_dir():
            parts = [_read(part) for part in sorted(path.glob("*.safetensors"))]
        elif path.is_file():
            parts = [_read(path)]
        else:
            raise TraceError(f"{path} does not exist; give a trace file, or the folder that was recorded to.")
        if not sum(part.trace.num_tokens for part in parts):
            raise TraceError(f"{path} holds no tokens; record some first, see docs/traces.md.")
        return _joined(parts)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}


@dataclass(frozen=True)
class _Part:
    """One file."""

    path: Path
    run: str
    trace: Trace


def _read(path: Path) -> _Part:
    with reading(path):
        file = read_file(path)
        known = {field.name for field in fields(Trace)}
        tensors: dict[str, Any] = {name: tensor for name, tensor in file.tensors.items() if name in known}
        requests = 1 + max([*tensors["request"].flatten().tolist(), *file.domain], default=-1)
        names = tuple(file.domain.get(number, "") for number in range(requests)) if file.domain else None
        return _Part(path, file.run, Trace(file.header, **tensors, domain=names))


def _joined(parts: Sequence[_Part]) -> Trace:
    """One trace of several files; runs after each other, each with requests of its own."""
    if any(part.trace.next_gate is None for part in parts):  # of gates that turned out to be wrong
        parts = [replace(part, trace=replace(part.trace, next_gate=None)) for part in parts]
    first = parts[0]
    for part in parts[1:]:
        if part.trace.header != first.trace.header:
            raise TraceError(
                f"{part.path} is of {_described(part.trace.header)}, and {first.path.name} beside it of "
                f"{_described(first.trace.header)}; put the traces of each model into a folder of their own."
            )
        if part.trace._tensors().keys() != first.trace._tensors().keys():
            raise TraceError(
                f"{part.path} and {first.path.name} beside it have not the same tensors (router inputs on and off?); "
                "put them into folders of their own."
            )
    if len(parts) == 1:
        return first.trace
    offset = 0
    domain: list[str] = []
    numbered: list[torch.Tensor] = []
    for _, group in itertools.groupby(parts, key=lambda part: part.run):
        run = list(group)
        requests = max(max(part.trace.num_requests, len(part.trace.domain or ())) for part in run)
        names = [""] * requests
        for part in run:
            numbered.append(part.trace.request + offset)
            for number, name in enumerate(part.trace.domain or ()):
                names[number] = name or names[number]
        domain += names
        offset += requests
    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part.trace, name) for part in parts]) for name in first.trace._tensors()
    }
    tensors["request"] = torch.cat(numbered)
    return Trace(first.trace.header, **tensors, domain=tuple(domain) if any(domain) else None)


def _described(header: TraceHeader) -> str:
    return (
        f"{header.model} ({header.num_layers} layers, {header.num_experts} experts, top {header.top_k}, fingerprint "
        f"{header.fingerprint})"
    )


def _kind(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
