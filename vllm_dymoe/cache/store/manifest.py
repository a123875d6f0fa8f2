"""The manifest of a store, ``dymoe_experts.json``.

It says what the store holds, for which model, and its quantization errors.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import PlainSerializer, TypeAdapter

from vllm_dymoe.cache.store.base import DamagedStoreError, StoreError
from vllm_dymoe.durable import read_regular
from vllm_dymoe.experts.encoding import CODEBOOKS, LATTICES, encoding_of
from vllm_dymoe.experts.format import DownFormat, ExpertFormat, ModelExperts, nested

MANIFEST = "dymoe_experts.json"
STORE_VERSION = 7
READABLE_VERSIONS = (5, 6, STORE_VERSION)
"""Versions that can be read. Before version 7 no digest bound a shard to its layer and model; version 5 stores
slices without alignment. Otherwise they are the same.
"""

BLOCK = 4096  # alignment of slices in new stores, in bytes: O_DIRECT reads them straight into a slot

_BINDING_VERSION = 7
_UNBOUND = frozenset(("shards", "errors"))
_FLAGS = {"integer_zeros": "zeros_in_steps", "act_order": "ordered"}
_CODEBOOKS, _OWN, _DOWN = "codebooks", "layer_formats", "down"
_NAMED = CODEBOOKS | LATTICES


def describe_encodings(formats: Mapping[int, ExpertFormat]) -> dict[str, Any]:
    """Return encodings in the form in which a manifest stores them.

    A checkpoint's quantization_config has the same form.
    """
    flags = {key: [bits for bits, fmt in formats.items() if getattr(fmt, field)] for field, key in _FLAGS.items()}
    named = {str(bits): fmt.encoding.name for bits, fmt in formats.items() if fmt.encoding.name in _NAMED}
    return flags | {_CODEBOOKS: named}


def read_encodings(described: Mapping[str, Any], bits: int) -> dict[str, Any]:
    """Return the encoding of one bit-width, as arguments of :class:`ExpertFormat`."""
    flags = {field: bits in described.get(key, ()) for field, key in _FLAGS.items()}
    named = described.get(_CODEBOOKS, {}).get(str(bits))
    return flags | {"encoding": encoding_of(bits, None if named is None else _NAMED[named])}


def _describe_own(fmt: ExpertFormat) -> dict[str, Any]:
    """Describe a layer's own format: what differs from that of the others."""
    said = {"bits": fmt.bits, "group_size": fmt.group_size, **describe_encodings({fmt.bits: fmt})}
    return said | _describe_down(fmt)


def _describe_down(fmt: ExpertFormat) -> dict[str, Any]:
    """Describe down projections; empty if they are packed as the others."""
    if fmt.down is None:
        return {}
    encoding, group_size, integer_zeros, act_order = fmt.down
    alone = replace(fmt, encoding=encoding, integer_zeros=integer_zeros, act_order=act_order, down=None)
    said = {"bits": alone.bits, "group_size": group_size, **describe_encodings({alone.bits: alone})}
    return {_DOWN: said}


def _read_own(said: Mapping[str, Any], usual: ExpertFormat) -> ExpertFormat:
    encodings = read_encodings(said, said["bits"])
    return replace(usual, group_size=said["group_size"], **encodings, down=_read_down(said))


def _read_down(said: Mapping[str, Any]) -> DownFormat | None:
    if (down := said.get(_DOWN)) is None:
        return None
    return DownFormat(group_size=down["group_size"], **read_encodings(down, down["bits"]))


def encodings_of(quantizer: str) -> dict[str, Any]:
    """Return a quantizer's encodings, in the form of ``describe_encodings``."""
    return (
        {_CODEBOOKS: {str(encoding.bits): encoding.name for encoding in LATTICES.values()}} if quantizer == "e8" else {}
    )


def _check_numbers(numbers: list[Any]) -> None:
    """Raise ValueError unless all numbers are integers above 0 of plausible size."""
    for number in numbers:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 1 << 31:
            raise ValueError(f"{number!r} is not a valid number of layers, experts, ranks or bytes")


Short = Annotated[float, PlainSerializer(lambda error: float(f"{error:.4g}"), return_type=float)]


@dataclass(frozen=True)
class ErrorRecord:
    """Relative errors, one number for each MoE layer.

    Each is the root of the sum of squares over the layer's experts. All but ``weight`` are empty without a calibration.
    """

    weight: Mapping[int, tuple[Short, ...]]  # by bit-width below 16, |W - dequantized W| / |W|
    # Of X W^T, where X are a calibration's inputs.
    output: Mapping[int, tuple[Short, ...]] = field(default_factory=dict)
    fallbacks: tuple[tuple[int, ...], ...] = ()  # experts of each layer that got too few tokens in the calibration
    experts: Mapping[int, tuple[tuple[Short, ...], ...]] = field(default_factory=dict)
    """By bit-width, the expected squared output error of each expert at routing weight 1."""


_ERRORS = TypeAdapter(ErrorRecord)


@dataclass(frozen=True)
class Manifest:
    """Content of a store, and its model.

    Errors, alignment and digests are not part of its identity.
    """

    experts: ModelExperts
    quantizer: str
    model: str  # fingerprint of the checkpoint from which it was made
    tensor_parallel: tuple[int, int] = (0, 1)  # rank and size of the slice in this store
    errors: ErrorRecord | None = field(default=None, compare=False)  # None if not recorded
    alignment: int = field(default=BLOCK, compare=False)  # slices begin at multiples of this many bytes in the files
    version: int = field(default=STORE_VERSION, compare=False)
    shards: Mapping[int, str] = field(default_factory=dict, compare=False)
    """``shard_digest`` of each layer's file; empty before they are written, and before version 7."""
    described: str = field(default="", compare=False, repr=False)
    """Of a manifest that was read: its fields that determine the meaning of bytes, as text."""

    @property
    def binds(self) -> bool:
        """Whether the manifest has digests of its files."""
        return self.version >= _BINDING_VERSION

    def shard_digest(self, layer: int, header: bytes, checksums: Iterable[bytes]) -> str:
        """Return the SHA-256 (hex) of what determines the content of a layer's file.

        It covers the manifest except errors, the layer, the file's header and its tables of checksums, so it differs
        for any other layer, model or store.
        """
        digest = hashlib.sha256()
        for part in ((self.described or _described(self.to_json())).encode(), str(layer).encode(), header, *checksums):
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def to_json(self) -> dict[str, Any]:
        fmt = next(iter(self.experts.formats.values()))
        rank, size = self.tensor_parallel
        return {
            "format": "vllm-dymoe experts",
            "version": self.version,
            "alignment": self.alignment,
            "layers": list(self.experts.layers),
            "num_experts": self.experts.num_experts,
            "top_k": self.experts.top_k,
            "hidden_size": fmt.hidden,
            "intermediate_size": fmt.intermediate,
            "bits": sorted(self.experts.formats, reverse=True),
            "group_size": fmt.group_size,
            "dtype": str(fmt.dtype).removeprefix("torch."),
            "bias": fmt.bias,
            "has_gate": fmt.has_gate,
            "nested": [bits for bits, version in self.experts.formats.items() if version.nested],
            **describe_encodings(self.experts.formats),
            **_describe_down(fmt),
            "quantizer": self.quantizer,
            "model": self.model,
            "tensor_parallel": {"rank": rank, "size": size},
            "blob_bytes": {str(bits): f.whole_nbytes for bits, f in self.experts.formats.items()},
            **({_OWN: own} if (own := {str(index): _describe_own(f) for index, f in self.experts.own.items()}) else {}),
            "errors": _ERRORS.dump_python(self.errors, mode="json") if self.errors else None,
            "curves": [list(curve) for curve in self.experts.curves],
            "shards": {str(layer): digest for layer, digest in self.shards.items()},
        }

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read the manifest of a store.

        Raises DamagedStoreError if it is invalid, StoreError if unreadable or of another version.
        """
        path = folder / MANIFEST
        try:
            data = json.loads(read_regular(path))
            if data["version"] not in READABLE_VERSIONS:
                raise StoreError(
                    f"{path} has store version {data['version']}, but this vllm-dymoe reads versions "
                    f"{', '.join(map(str, READABLE_VERSIONS))}; write the store again with `vllm-dymoe quantize`."
                )
            dtype = getattr(torch, data["dtype"])
            formats = {
                bits: ExpertFormat(
                    data["hidden_size"],
                    data["intermediate_size"],
                    group_size=data["group_size"],
                    dtype=dtype,
                    bias=data["bias"],
                    has_gate=data.get("has_gate", True),
                    down=_read_down(data),
                    **read_encodings(data, bits),
                )
                for bits in data["bits"]
            }
            for bits in data["nested"]:
                formats[bits] = nested(formats[bits])
                formats[bits // 2] = formats[bits].base
            curves = tuple(tuple(map(float, curve)) for curve in data.get("curves", ()))
            shape = tuple(data["layers"]), data["num_experts"], data["top_k"]
            errors = _ERRORS.validate_python(data["errors"]) if data.get("errors") else None
            lost = dict(zip(data["layers"], errors.experts.get(min(formats), ()), strict=False)) if errors else {}
            usual = next(iter(formats.values()))
            own = {int(index): _read_own(said, usual) for index, said in data.get(_OWN, {}).items()}
            experts = ModelExperts(*shape, formats, curves=curves, lost=lost, own=own)
            for bits, fmt in formats.items():
                if (held := data["blob_bytes"][str(bits)]) != fmt.whole_nbytes:
                    raise ValueError(f"packed experts have {held} bytes, but {fmt.whole_nbytes} are expected")
            parallel = data["tensor_parallel"]
            rank, alignment = (parallel["rank"], parallel["size"]), data.get("alignment", 1)
            _check_numbers([alignment, *shape[1:], parallel["size"], *(number + 1 for number in (*shape[0], rank[0]))])
            shards = {int(layer): str(digest) for layer, digest in data.get("shards", {}).items()}
            told = data["version"], shards, _described(data)
            return cls(experts, data["quantizer"], data["model"], rank, errors, alignment, *told)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreError(f"{folder} holds no expert store: {MANIFEST} cannot be read ({reason}).") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
            raise DamagedStoreError(
                f"{path} is not a manifest of an expert store ({error!r}); write the store again."
            ) from error


def _described(data: Mapping[str, Any]) -> str:
    """Return the fields that determine the meaning of bytes, as text.

    The text does not depend on the order of the fields.
    """
    return json.dumps({name: value for name, value in data.items() if name not in _UNBOUND}, sort_keys=True)
