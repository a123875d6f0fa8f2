"""Reads a local Hugging Face checkpoint without vLLM.

The checkpoint has 16 bits or is quantized. Headers say where every tensor is, so unsupported checkpoints are refused
before any weight is read.
"""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_dymoe.cache.store.header import TensorPlace
from vllm_dymoe.cache.store.manifest import encodings_of
from vllm_dymoe.durable import open_regular
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, Projection, stored_formats
from vllm_dymoe.quantize.held import Matrix, widened
from vllm_dymoe.quantize.model_config import EXPERT_INPUTS, INTERMEDIATE, TOP_K, ModelConfig, has_gate
from vllm_dymoe.quantize.readers import Reader, make_reader
from vllm_dymoe.quantize.readers.base import DTYPES, FLOATS, format_fields
from vllm_dymoe.quantize.readers.modules import ExpertModule, modules_of
from vllm_dymoe.quantize.tensor_names import ExpertName, Stacking, read_name
from vllm_dymoe.quantize.tensors import CheckpointError, read_places, read_tensors

_SAMPLE_BYTES = 512
_FILE_SAMPLES = 4096  # samples of a file whose tensors are not known
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf"))


@dataclass(frozen=True)
class ExpertTensors:
    """The tensors of one expert's matrix, or of a stack of a layer's experts."""

    layer: int  # number of the layer in a store: its index in the model; a second modality's layers come after those
    expert: int | None  # None for a stack
    projections: tuple[Projection, ...]  # projections in its rows
    parts: Mapping[str, TensorPlace]
    """Tensors by the endings of their names: "weight" and "bias", or those of a quantized checkpoint."""


@dataclass(eq=False)
class Checkpoint:
    """One local checkpoint folder; reading experts is safe from several threads."""

    folder: Path
    config: ModelConfig
    reader: Reader
    dense: dict[str, TensorPlace] = field(default_factory=dict)
    """All tensors by name except those of the model's experts; those of drafts are kept unchanged, too."""
    experts: list[ExpertTensors] = field(default_factory=list)  # the tensors of all experts
    _files: dict[Path, Any] = field(default_factory=dict)
    _second: int = 0  # number of the model's layer 0 among those of a second modality; 0 if there is none

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Find and check the tensors of a folder.

        Raises CheckpointError if it cannot be quantized.
        """
        config, places = ModelConfig(folder), read_tensors(folder)
        found = cls(folder, config, make_reader(config.quantization, _modules(config, places)))
        found._sort(places)
        without = sum("bias" not in tensors.parts for tensors in found.experts)
        if 0 < without < len(found.experts):
            raise CheckpointError(
                f"{folder} has biases for some projections of its experts, but not for {without} others; "
                "only models with biases for all or none of them can be quantized."
            )
        _ = found._matrices
        for tensors in found.experts:
            found._check_shapes(tensors)
        _, up, _ = found._plain_format.matrices
        if len(set(config.widths)) > 1 and found.reader.held:
            raise CheckpointError(
                f"the quantized experts of {folder} have several widths, {config.widths}, which is supported for "
                "16-bit checkpoints only; quantize one of those."
            )
        check_representatives(folder, found.reader, found.experts, up.columns, up.rows)
        return found

    @property
    def expert_bytes(self) -> int:
        return sum(self.layer_bytes)

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        found = dict.fromkeys(self.layers, 0)
        for tensors in self.experts:
            found[tensors.layer] += sum(place.nbytes for place in tensors.parts.values())
        return tuple(found.values())

    @property
    def dense_bytes(self) -> int:
        return sum(place.nbytes for place in self.dense.values())

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of ``--dtype auto``, as in vLLM.

        The checkpoint's own, or bfloat16 for a checkpoint of 32 bits.
        """
        stored = sorted(place.dtype for place in self.experts[0].parts.values() if place.dtype in FLOATS)
        dtype = self.config.dtype or (DTYPES[stored[0]] if stored else torch.bfloat16)
        return torch.bfloat16 if dtype == torch.float32 else dtype

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the MoE layers in a store, in the order in which vLLM makes them."""
        return tuple(sorted({tensors.layer for tensors in self.experts}, key=lambda n: (self._index(n), n)))

    @cached_property
    def projections(self) -> tuple[Projection, ...]:
        """Projections of every expert; some models have no gate."""
        return tuple(Projection)[not has_gate(self.config.model_type) :]

    def model_experts(
        self, bits: tuple[int, ...], group_size: int, dtype: torch.dtype, quantizer: str = "rtn"
    ) -> ModelExperts:
        """Return the content of a store of this checkpoint.

        ``bits`` start with the high precision. Raises CheckpointError if no store can hold it.
        """
        hidden, intermediate = self.config.size(*EXPERT_INPUTS), self.config.size(*INTERMEDIATE)
        biased = any("bias" in tensors.parts for tensors in self.experts)
        formats = stored_formats(
            bits,
            lambda width: ExpertFormat(
                hidden,
                intermediate,
                group_size=group_size,
                dtype=dtype,
                bias=biased,
                has_gate=Projection.GATE in self.projections,
                **format_fields(self.reader, encodings_of(quantizer), width),
            ),
        )
        try:
            for fmt in formats.values():
                _ = fmt.nbytes
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the experts of {self.folder} cannot be packed: {error}.") from error
        return ModelExperts(self.layers, self.config.num_experts, self.config.size(*TOP_K), formats)

    def expert(self, position: int, expert: int) -> dict[Projection, Matrix]:
        """Return one expert by projection, padded with zeros to the widest layer's width.

        If the layer has fewer experts than others, missing ones are zeros. Raises CheckpointError if a tensor cannot be
        read or does not match config.json.
        """
        if expert < self._count(self.layers[position]):
            return {projection: self._matrix(position, expert, projection) for projection in self.projections}
        fmt = self._plain_format

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self.dtype)

        return {
            of: (
                zeros(fmt.matrices[of].rows, fmt.matrices[of].columns),
                zeros(fmt.matrices[of].rows) if fmt.bias else None,
            )
            for of in self.projections
        }

    def plain_places(self, experts: ModelExperts) -> dict[tuple[int, int, Projection], TensorPlace] | None:
        """Return the tensor of each projection, if it is what a store of it would hold.

        Keys are the layer's position, the expert and the projection. None if any byte would differ: with other layers,
        sizes or dtypes, with biases or stacks, and for quantized experts.
        """
        if self.reader.held or self.reader.mixed or set(experts.formats) != {16} or experts.layers != self.layers:
            return None
        fmt, found = experts.formats[16], dict[tuple[int, int, Projection], TensorPlace]()
        dtypes = {name for name, dtype in DTYPES.items() if dtype == fmt.dtype}
        for (layer, expert, projection), tensors in self._matrices.items():
            place, matrix = tensors.parts["weight"], fmt.matrices[projection]
            same = place.shape == (matrix.rows, matrix.columns) and place.nbytes == matrix.nbytes
            if not same or place.dtype not in dtypes or tensors.expert is None or len(tensors.parts) > 1:
                return None
            found[self.layers.index(layer), expert, projection] = place
        return found if len(found) == len(self.layers) * experts.num_experts * len(experts.projections) else None

    def fingerprint(self) -> str:
        """Return sixteen hex digits that identify the weights.

        The digits hash names, shapes and a sample of each tensor (of each expert in a stack). Copying the folder does
        not change them, training the model further does.
        """
        return _sampled([*self.dense.values(), *(place for one in self.experts for place in one.parts.values())])

    def _matrix(self, position: int, expert: int, projection: Projection) -> Matrix:
        weight, bias = self._own_matrix(self._matrices[self.layers[position], expert, projection], expert, projection)
        missing = self._plain_format.intermediate - self._format(self.layers[position]).intermediate
        if missing and isinstance(weight, Tensor):
            weight = widened(weight, projection, missing)
            bias = None if bias is None else widened(bias, projection, missing)
        return weight, bias

    def _own_matrix(self, tensors: ExpertTensors, expert: int, projection: Projection) -> Matrix:
        parts = {part: self._read(tensors, part, expert, projection) for part in tensors.parts}
        bias, reader = parts.pop("bias", None), self._reader(tensors)
        if not reader.held:
            return parts["weight"], bias
        matrix = self._format(tensors.layer).matrices[projection]
        rows = matrix.rows * len(tensors.projections)
        try:
            held = reader.read(parts, rows, matrix.columns)
            if len(tensors.projections) > 1:
                which = self.stacking.rows(rows, tensors.projections)[tensors.projections.index(projection)]
                held = held.part(0, which)
        except ValueError as error:
            stem = tensors.parts[reader.parts[0]].name.rpartition(".")[0]
            raise CheckpointError(f"{stem} in {self.folder} is no {reader.method} matrix: {error}") from error
        if self.reader.mixed:
            try:
                held.check_scales(self.dtype)
            except ValueError as error:
                raise CheckpointError(f"{tensors.parts[reader.parts[0]].name}: {error}") from error
            return held.dequantize(), bias
        return held, bias

    def _reader(self, tensors: ExpertTensors) -> Reader:
        return self.reader.at(self._index(tensors.layer), tensors.projections[0])

    def _index(self, layer: int) -> int:
        """Return a layer's index in the model."""
        return layer - self._second * self._modality(layer)

    def _modality(self, layer: int) -> int:
        return int(0 < self._second <= layer)

    def _count(self, layer: int) -> int:
        """Return the number of a layer's experts."""
        return self.config.modalities[self._modality(layer)]

    def _format(self, layer: int) -> ExpertFormat:
        """Return the format of a layer's experts at 16 bits, for its shapes."""
        return replace(self._plain_format, intermediate=self.config.widths[self._modality(layer)])

    def _read(self, tensors: ExpertTensors, part: str, expert: int, projection: Projection) -> Tensor:
        place = tensors.parts[part]
        try:
            if place.path not in self._files:
                self._files[place.path] = safe_open(place.path, framework="pt")
            file = self._files[place.path]
            stacked = tensors.expert is None
            found: Tensor = file.get_slice(place.name)[expert] if stacked else file.get_tensor(place.name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{place.path} cannot be read ({error}); download it again.") from error
        reader = self._reader(tensors)
        if not stacked or (reader.held and part in reader.parts):
            return found  # the reader knows the layout of its parts
        return self.stacking.split(found, tensors.projections)[tensors.projections.index(projection)]

    def _sort(self, tensors: Mapping[str, TensorPlace]) -> None:
        named = {name: found for name in tensors if (found := read_name(name)) and found.of_model}
        stacks, beyond = {found.layers for found in named.values()}, self.config.num_layers
        if not stacks:
            raise CheckpointError(
                f"{self.folder} contains no expert tensors (layers.0.….experts.0.gate_proj.weight or the like); "
                "only Mixture-of-Experts models can be quantized here."
            )
        if len(stacks) > 1:
            raise CheckpointError(f"{self.folder} has experts in several places, {' and '.join(sorted(stacks))}.")
        experts = []
        for name, place in tensors.items():
            if name in named and named[name].layer < beyond:  # later layers are a draft's
                experts.append((named[name], place))
            else:
                self.dense[name] = place
        if not experts:
            raise CheckpointError(
                f"config.json in {self.folder} says that the model has {beyond} layers, and only later layers have "
                "experts; download the checkpoint again."
            )
        self.experts = group_experts(self.folder, self.reader, experts)
        if len(self.config.modalities) > 1:
            self._part_modalities()

    def _part_modalities(self) -> None:
        """Number the layers of a second modality's experts after all others.

        ``layer_numbers`` does the same with vLLM's layers. Names number a layer's experts of the second modality after
        those of the first.
        """
        first = self.config.modalities[0]
        if any(tensors.expert is None for tensors in self.experts):
            raise CheckpointError(
                f"{self.folder} has the experts of several modalities in one tensor, which is not supported; use the "
                "checkpoint that its authors published."
            )
        self._second = 1 + max(tensors.layer for tensors in self.experts)
        self.experts = [
            tensors
            if tensors.expert is None or tensors.expert < first
            else replace(tensors, layer=tensors.layer + self._second, expert=tensors.expert - first)
            for tensors in self.experts
        ]

    @cached_property
    def _matrices(self) -> dict[tuple[int, int, Projection], ExpertTensors]:
        """The tensors of every projection, by layer index, expert and projection.

        Raises CheckpointError for missing and duplicate ones.
        """
        found: dict[tuple[int, int, Projection], ExpertTensors] = {}
        for tensors in self.experts:
            there, count = next(iter(tensors.parts.values())).name, self._count(tensors.layer)
            for expert in range(count) if tensors.expert is None else (tensors.expert,):
                for projection in tensors.projections:
                    if (tensors.layer, expert, projection) in found or expert >= count:
                        why = "exists twice" if expert < count else f"is one too many: config.json says {count}"
                        raise CheckpointError(f"expert {expert} of {there} in {self.folder} {why}.")
                    if self._reader(tensors).parts[0] in tensors.parts:
                        found[tensors.layer, expert, projection] = tensors
        wanted = {
            (layer, expert, of)
            for layer in self.layers
            for expert in range(self._count(layer))
            for of in self.projections
        }
        missing = sorted(wanted - found.keys())
        if missing:
            layer, expert, projection = missing[0]
            raise CheckpointError(
                f"{self.folder} lacks {len(missing)} projections of experts, the first being the "
                f"{projection.name.lower()} projection of expert {expert} in layer {layer}; download it again."
            )
        return found

    @cached_property
    def stacking(self) -> Stacking:
        """The layout of stacked matrices, inferred from their shapes.

        [columns, rows] fits at most one of the two layouts.
        """
        transposed = False
        for tensors in self.experts:
            place = tensors.parts.get("weight")
            if tensors.expert is None and place is not None and len(place.shape) == 3:
                rows = sum(self._plain_format.matrices[projection].rows for projection in tensors.projections)
                expected = rows, self._plain_format.matrices[tensors.projections[0]].columns
                if place.shape[1:] != expected:
                    transposed = place.shape[1:] == expected[::-1]
                    break
        return Stacking(transposed, interleaved=self.config.model_type == "gpt_oss")

    @cached_property
    def _plain_format(self) -> ExpertFormat:
        """The format of one expert at 16 bits, for its shapes."""
        return self.model_experts((16,), 64, torch.bfloat16).formats[16]

    def _check_shapes(self, tensors: ExpertTensors) -> None:
        """Raise CheckpointError for shapes that differ from the configuration.

        Readers check quantized tensors themselves.
        """
        matrices = [self._format(tensors.layer).matrices[projection] for projection in tensors.projections]
        rows = sum(matrix.rows for matrix in matrices)
        stacked, count = tensors.expert is None, self._count(tensors.layer)
        reader = self._reader(tensors)
        for part, matrix in (("weight", (rows, matrices[0].columns)), ("bias", (rows,))):
            place = tensors.parts.get(part)
            if place is None or (reader.held and part in reader.parts):
                continue
            expected = (count, *self.stacking.shape(matrix)) if stacked else matrix
            if place.shape != expected:
                raise CheckpointError(
                    f"{place.name} in {self.folder} has shape {list(place.shape)}, but config.json says "
                    f"{list(expected)}."
                )


def _modules(config: ModelConfig, tensors: Mapping[str, TensorPlace]) -> list[ExpertModule] | None:
    """Return the experts' matrices, by which rules are interpreted.

    None if nothing is quantized.
    """
    if config.quantization is None:
        return None
    return modules_of({name: place.dtype for name, place in tensors.items()}, config.num_layers)[0]


def group_experts(folder: Path, reader: Reader, found: Iterable[tuple[ExpertName, TensorPlace]]) -> list[ExpertTensors]:
    """Group tensors by matrix.

    Raises CheckpointError for an unsupported tensor, or a missing part.
    """
    matrices: dict[tuple[int, int | None, tuple[Projection, ...]], dict[str, TensorPlace]] = {}
    of_all = reader
    for named, place in found:
        reader = of_all.at(named.layer, named.projections[0]) if named.projections else of_all
        part = reader.spellings.get(named.part, named.part)
        dtypes = FLOATS if part == "bias" else reader.dtypes.get(part, ())
        if not named.projections or part not in (*reader.known_parts, "bias") or (dtypes and place.dtype not in dtypes):
            what = f"{place.name} ({place.dtype}, {list(place.shape)}) in {folder}"
            if not reader.held:
                raise CheckpointError(
                    f"{what} belongs to experts but is not the 16-bit weight or bias of a gate, up or down projection, "
                    "and config.json names no supported quantization of it."
                )
            expected = f"{part} of {' or '.join(dtypes)}" if dtypes else " and ".join(reader.known_parts)
            raise CheckpointError(
                f"{what} does not match config.json: {reader.method} has {expected} there; correct the "
                "quantization_config, or download the checkpoint again if it was changed."
            )
        parts = matrices.setdefault((named.layer, named.expert, named.projections), {})
        if part in parts:
            raise CheckpointError(f"expert {named.expert} of {place.name} in {folder} exists twice.")
        parts[part] = place
    for (layer, _, projections), parts in matrices.items():
        reader = of_all.at(layer, projections[0])
        lacking = [part for part in reader.parts if part not in parts]
        if lacking and parts.keys() != {"bias"}:
            raise CheckpointError(
                f"{folder} has {next(iter(parts.values())).name} without {' and '.join(lacking)}, which "
                f"{reader.method} needs; the checkpoint is damaged or half converted: download it again."
            )
    return [ExpertTensors(*matrix, parts) for matrix, parts in matrices.items()]


def check_representatives(
    folder: Path, reader: Reader, experts: Iterable[ExpertTensors], hidden: int, intermediate: int
) -> None:
    """Raise CheckpointError if quantized experts contradict config.json.

    They contradict it if they have other bits or groups. One matrix of each projection and reader is read, and the
    others must have its shapes. Whoever packs them checks the rest: stacks, and experts of which no matrix can be read,
    because ``intermediate`` may not be their width.
    """
    seen: dict[tuple[int, Projection], ExpertTensors] = {}
    wrong, right = list[str](), 0
    for tensors in experts:
        own = reader.at(tensors.layer, tensors.projections[0])
        if not own.held or tensors.expert is None or not set(own.parts) <= tensors.parts.keys():
            continue
        projection, names = tensors.projections[0], sorted(tensors.parts)
        first = seen.setdefault((id(own), projection), tensors)
        there = next(iter(tensors.parts.values())).name.rpartition(".")[0]
        why = ""
        if first is tensors:
            rows, columns = (hidden, intermediate) if projection is Projection.DOWN else (intermediate, hidden)
            try:
                own.read({part: _load(place) for part, place in tensors.parts.items() if part != "bias"}, rows, columns)
                right += 1
            except ValueError as error:
                why = str(error)
        elif other := [part for part in names if part in first.parts and _shape(tensors, part) != _shape(first, part)]:
            shapes = list(_shape(tensors, other[0])), list(_shape(first, other[0]))
            whose = next(iter(first.parts.values())).name.rpartition(".")[0]
            why = f"{other[0]} has shape {shapes[0]}, and that of {whose} {shapes[1]}."
        if why:
            wrong.append(f"{there} in {folder} is no {own.summary}, as config.json says: {why.removesuffix('.')}")
    if wrong and right:
        raise CheckpointError(
            f"{wrong[0]}; correct the quantization_config, with a rule for what has other bits or groups, or download "
            "the checkpoint again if it was changed."
        )


def _shape(tensors: ExpertTensors, part: str) -> tuple[int, ...]:
    return tuple(tensors.parts[part].shape)


def _load(place: TensorPlace) -> Tensor:
    try:
        with safe_open(place.path, framework="pt") as file:
            found: Tensor = file.get_tensor(place.name)
            return found
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{place.path} cannot be read ({error}); download it again.") from error


def content_fingerprint(folder: Path) -> str:
    """Return sixteen hex digits of a folder's weights, as ``Checkpoint.fingerprint``.

    Empty if the folder has no weights. Raises CheckpointError if a file cannot be read.
    """
    try:
        return Checkpoint.open(folder).fingerprint()
    except CheckpointError:  # vLLM reads more kinds of checkpoints than we do
        pass
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in _WEIGHT_SUFFIXES]
    try:
        return _sampled([place for path in paths for place in _parts(path)])
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error}); download it again.") from error


def _parts(path: Path) -> list[TensorPlace]:
    """Return the tensors of a file, or equal parts of a file in another format."""
    size = path.stat().st_size
    if path.suffix == ".safetensors":
        with contextlib.suppress(CheckpointError):
            return list(read_places(path).values())
    step = max(_SAMPLE_BYTES, size // _FILE_SAMPLES)
    begins = range(0, max(1, size), step)
    return [
        TensorPlace(f"{path.name} {begin} of {size}", path, "", (), begin, min(size, begin + step)) for begin in begins
    ]


def _samples(place: TensorPlace) -> Iterator[tuple[int, int]]:
    """Yield the first byte and the number of bytes of each sample of a tensor."""
    parts = place.shape[0] if len(place.shape) == 3 else 1
    size = place.nbytes // max(1, parts)
    for part in range(parts if size else 0):
        yield place.begin + part * size + max(0, size - _SAMPLE_BYTES) // 2, min(size, _SAMPLE_BYTES)


def _sampled(places: Sequence[TensorPlace]) -> str:
    """Return sixteen hex digits of names, shapes and a sample of each tensor.

    Of a stack there is a sample of each expert. Empty if there are no tensors. Raises CheckpointError if a file cannot
    be read.
    """
    digest, path = hashlib.sha256(), Path()
    files: dict[Path, int] = {}
    ordered = sorted(places, key=lambda place: place.name)
    try:
        for place in ordered:  # the disk reads many samples at once, while the first is waited for
            path = place.path
            if path not in files:
                files[path] = open_regular(path)
            for begin, nbytes in _samples(place):
                os.posix_fadvise(files[path], begin, nbytes, os.POSIX_FADV_WILLNEED)
        for place in ordered:
            path = place.path
            digest.update(f"{place.name} {place.dtype} {place.shape}".encode())
            for begin, nbytes in _samples(place):
                digest.update(os.pread(files[path], nbytes, begin))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); download it again.") from error
    finally:
        for file in files.values():
            os.close(file)
    return digest.hexdigest()[:16] if places else ""
