"""The files of traces: safetensors, written under another name and renamed when they are whole (docs/traces.md)."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from vllm_dymoe.residency.identity import ModelIdentity

TRACE_FORMAT = 1
INCOMPLETE = ".incomplete"
"""Ends the name of a file that is still being written."""
_KIND = "vllm-dymoe trace"


class TraceError(RuntimeError):
    """A trace that cannot be read or used; the message is one sentence that names the file."""


TraceHeader = ModelIdentity
"""Whose routers a trace is of."""


def expert_dtype(num_experts: int) -> torch.dtype:
    """The smallest dtype that holds an expert's number."""
    return torch.uint8 if num_experts <= 256 else torch.int16


def write_file(
    path: Path, header: TraceHeader, tensors: Mapping[str, torch.Tensor], domain: Mapping[int, str], run: str = ""
) -> int:
    """Write one file under another name, and rename it when it is complete.

    Args:
        path: where to.
        header: whose routers they are.
        tensors: as the attributes of :class:`Trace`.
        domain: names by request, of those that have one.
        run: files of the same run number their requests together.

    Returns:
        Bytes of the file.

    Raises:
        TraceError: it cannot be written.
    """
    metadata = {
        "kind": _KIND,
        "header": json.dumps(asdict(header) | {"format": TRACE_FORMAT}),
        "domain": json.dumps({str(number): name for number, name in domain.items()}),
        "run": run,
    }
    incomplete = path.with_name(path.name + INCOMPLETE)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, incomplete, metadata)
        with incomplete.open("rb") as file:
            os.fsync(file.fileno())
            nbytes = os.fstat(file.fileno()).st_size
        incomplete.replace(path)
    except (OSError, SafetensorError) as error:
        incomplete.unlink(missing_ok=True)
        raise TraceError(f"{path} cannot be written ({error}).") from error
    return nbytes


def read_header(path: Path) -> tuple[TraceHeader, frozenset[str]]:
    """Whose routers a file is of, and which tensors it has.

    Raises:
        TraceError: it is damaged or not a trace.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        return _header(path, file.metadata() or {}), frozenset(file.keys())


@dataclass(frozen=True)
class TraceFile:
    """What a file holds, not yet seen to be a trace as a whole.

    Attributes:
        header: whose routers they are.
        tensors: by name.
        domain: names by request, of those that have one.
        run: the file's own name if it belongs to no run.
    """

    header: TraceHeader
    tensors: Mapping[str, torch.Tensor]
    domain: Mapping[int, str]
    run: str


def read_file(path: Path) -> TraceFile:
    """Read one file.

    Raises:
        TraceError: it is damaged or not a trace.
    """
    with reading(path), safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        header = _header(path, metadata)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        domain = {int(number): str(name) for number, name in json.loads(metadata["domain"]).items()}
        return TraceFile(header, tensors, domain, metadata["run"] or path.name)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Make one sentence that names the file of whatever goes wrong.

    Raises:
        TraceError: in place of the errors that a damaged or foreign file causes.
    """
    try:
        yield
    except TraceError as error:
        raise error if str(path) in str(error) else TraceError(f"{path} is not a whole trace: {error}") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path} cannot be read as a trace ({reason}); it is cut off, damaged or foreign.") from error


def _header(path: Path, metadata: Mapping[str, str]) -> TraceHeader:
    if metadata.get("kind") != _KIND:
        raise TraceError(f"{path} is not a trace of vllm-dymoe.")
    described = json.loads(metadata["header"])
    version = described.pop("format", None)
    if version != TRACE_FORMAT:
        raise TraceError(
            f"{path} has format {version}, and this vllm-dymoe reads {TRACE_FORMAT}; record it again, or use the "
            "version that wrote it."
        )
    header = TraceHeader(**described)
    for field in fields(TraceHeader):
        if not isinstance(getattr(header, field.name), field.type if isinstance(field.type, type) else object):
            raise TypeError(f"{field.name} is {getattr(header, field.name)!r}")
    return header
