"""Packs the experts of a checkpoint into sections of a store.

Each projection is quantized at every stored bit-width and written directly to its place, so nothing bigger than one
projection is ever unpacked. Codes that the checkpoint already has at one of these bit-widths are kept.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vllm_dymoe.cache.store import ErrorRecord, FileStore, StoreError
from vllm_dymoe.cache.store.writer import JOURNAL, StoreWriter
from vllm_dymoe.durable import append_line, open_regular, read_regular, write_synced
from vllm_dymoe.experts.format import ModelExperts, Projection, SliceKey
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.kernels.lattice import rotate
from vllm_dymoe.kernels.pack import rotated_weights
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.error_tally import ErrorTally
from vllm_dymoe.quantize.gptq import Curvature, quantize_gptq
from vllm_dymoe.quantize.held import Held, Matrix
from vllm_dymoe.quantize.lattice import quantize_lattice
from vllm_dymoe.quantize.quantizers import QUANTIZERS, Quantizer, pack_bias, quantize_matrix
from vllm_dymoe.quantize.side_by_side import SideBySide
from vllm_dymoe.quantize.tensors import CheckpointError

FALLBACK = "hqq"  # quantizer for experts that a calibration saw too rarely

Place = tuple[int, int, Projection]  # position of the layer, local expert, and projection

Given = Tensor | Held | Callable[[], Tensor | Held]
"""A weight, or a function that returns it, called by the thread that packs it."""

# Bytes of memory per weight while it is packed: codes and their copies (3.2 measured), or floats and the codes read for
# them (8.2).
_BYTES_OF_HELD, _BYTES_OF_QUANTIZED = 4, 10


class Journal:
    """A file next to the shards that lists complete layers.

    Its first line, the purpose, contains everything that determines the shards; each other line names a complete,
    synced layer. A journal with another purpose is started anew. StoreError if it cannot be read or written.
    """

    def __init__(self, writer: StoreWriter, purpose: str) -> None:
        self._writer, self._path = writer, writer.partial / JOURNAL
        with writer.refusals():
            found = read_regular(self._path).decode() if self._path.exists() else ""
            lines = found.rpartition("\n")[0].split("\n")  # a killed run may not have ended its last line
            if lines[0] != purpose:
                lines = [purpose]
                write_synced(self._path, f"{purpose}\n".encode())
        self.layers: dict[int, Any] = dict(map(json.loads, lines[1:]))  # of earlier runs

    def add(self, layer: int, state: Any) -> None:
        """Record that a layer is complete, after making it durable.

        ``layer`` is its position, and ``state`` is JSON data that is needed later.
        """
        self._writer.sync(layer)
        with self._writer.refusals():
            append_line(self._path, json.dumps((layer, state)).encode())


def journal_purpose(folder: Path) -> str:
    """Return the purpose of the journal in a folder; empty if there is none."""
    try:
        with open(open_regular(folder / JOURNAL)) as file:
            return file.readline().removesuffix("\n")
    except (OSError, ValueError):
        return ""


def leave(writer: StoreWriter, error: BaseException) -> None:
    """Stop writing after an error; the next run continues, unless weights are wrong.

    A checkpoint with wrong weights will be downloaded again, and nothing may be kept of it. Errors that OSError or
    RuntimeError have caused say nothing about weights: the disk is full, or threads cannot be started.
    """
    if isinstance(error, StoreError | CheckpointError) and not isinstance(error.__cause__, OSError | RuntimeError):
        writer.discard()
    else:
        writer.leave()


def pack(
    checkpoint: Checkpoint,
    experts: ModelExperts,
    quantizer: str,
    writer: StoreWriter,
    calibration: Calibration | None = None,
    journal: Journal | None = None,  # records packed layers, which are skipped; each that is packed and synced is added
    progress: Callable[[int], None] = lambda nbytes: None,  # called with numbers of source bytes done
) -> ErrorRecord:
    """Pack every expert of a checkpoint.

    A whole expert is packed at a time, because down's inputs depend on the other projections.

    Args:
        calibration: for GPTQ and lattices. Experts with too few tokens are quantized with HQQ, or, for a lattice, with
            the inputs of their layer.
    """
    errors = ErrorTally(experts)
    chosen = QUANTIZERS[quantizer if calibration is None else FALLBACK]
    fmt = next(iter(experts.formats.values()))
    rare: dict[int, list[int]] = {}

    def work() -> Iterator[tuple[int, int]]:
        for layer in range(len(experts.layers)):
            if journal is not None and layer in journal.layers:
                errors.restore(layer, journal.layers[layer])
                progress(checkpoint.layer_bytes[layer])
                continue
            if calibration is not None:
                rare[layer] = calibration.rare(layer)
                errors.fell_back(layer, rare[layer])
            for expert in range(experts.num_experts):
                yield layer, expert

    def do(layer: int, expert: int) -> None:
        matrices = checkpoint.expert(layer, expert)
        outer = inner = None
        borrow = calibration is not None and expert in rare[layer]
        if calibration is not None and (fmt.encoding.lattice or not borrow):
            outer, inner = calibration.curvatures(layer, expert, matrices, fmt.rotations, borrow=borrow)
        for projection, matrix in matrices.items():
            curvature = inner if projection is Projection.DOWN else outer
            pack_projection(experts, (layer, expert, projection), matrix, chosen, writer, errors, curvature)

    def done(layer: int, expert: int) -> None:
        progress(checkpoint.layer_bytes[layer] // experts.num_experts)
        if journal is not None and expert == experts.num_experts - 1:
            journal.add(layer, errors.of_layer(layer))

    # Closed here, because an error may close the writer's files next, when no thread may write to them any more.
    with contextlib.closing(SideBySide(done)) as cores:
        for layer, expert in work():
            cores.submit(checkpoint.layer_bytes[layer] // experts.num_experts, do, layer, expert)
        cores.wait()
    return errors.record()


def pack_projection(
    experts: ModelExperts,
    place: Place,
    matrix: Matrix,
    quantizer: Quantizer,
    writer: StoreWriter,
    errors: ErrorTally,
    curvature: Curvature | None = None,
) -> None:
    """Write one projection at every stored bit-width.

    Safe to call from several threads. Given the curvature of its inputs (rotated for a lattice), GPTQ replaces the
    quantizer. Codes are kept for the version of their bits; other versions are quantized from their dequantized
    weights. Raises StoreError if the shape is not the model's, weights are not finite, or codes cannot be kept.
    """
    weight, bias = matrix
    quantizer = quantizer if curvature is None else partial(quantize_gptq, curvature=curvature)
    for bits, fmt in experts.of_layers[place[0]].items():
        form = fmt.matrices[place[2]]
        if form.encoding.upper_of:  # written with the whole codes
            continue
        if tuple(weight.shape) != (form.rows, form.columns):
            raise StoreError(
                f"the {_name(experts, place)} has shape {list(weight.shape)} in the checkpoint, "
                f"but the model's configuration says {[form.rows, form.columns]}."
            )
        section = torch.empty(form.nbytes, dtype=torch.uint8)
        base = torch.empty(form.base.nbytes, dtype=torch.uint8) if form.nested else None
        taken = isinstance(weight, Held) and form.bits == weight.bits
        try:
            if isinstance(weight, Held) and taken:
                weight.pack(form, section, base)
                plain = weight.dequantize() if form.nested else None
            else:
                plain = _plain(weight, form)
                if form.encoding.lattice:
                    assert curvature is not None
                    quantize_lattice(plain, form, curvature, section, base)
                else:
                    quantize_matrix(plain, form, quantizer, section, base)
        except ValueError as error:
            what = f"{'taken as it is at' if taken else 'quantized to'} {form.bits} bits"
            raise StoreError(f"the {_name(experts, place)} cannot be {what}: {error}") from error
        low = None if base is None else form.base.view(base)
        packed = form.view(section, low)
        if bias is not None:
            try:
                pack_bias(bias, packed)
            except ValueError as error:
                raise StoreError(f"the bias of the {_name(experts, place)} cannot be stored: {error}") from error
        lossy = [] if taken or not form.quantized else [packed]
        for version in lossy if low is None else (*lossy, low):
            assert plain is not None
            read = rotated_weights(version) if form.encoding.lattice else dequantize(version)
            errors.add(place, plain, read, version.format.bits, curvature)
        if base is not None:
            writer.write(SliceKey(place[0], place[1], form.base.bits), place[2], base)
        writer.write(SliceKey(place[0], place[1], bits), place[2], section)


def _plain(weight: Tensor | Held, form: MatrixFormat) -> Tensor:
    """Return the weights to quantize, rotated for a lattice.

    Raises ValueError for codes whose scales the format cannot hold.
    """
    if isinstance(weight, Held):
        weight.check_scales(form.dtype)
        weight = weight.dequantize()
    return rotate(weight.float(), form.rotation) if form.encoding.lattice else weight


class ExpertPacker:
    """Takes weights and biases in any order, and knows which are missing.

    Parts of a matrix wait for the rest. Threads pack them, so that an error is raised later, by ``finish`` at the
    latest. Weights of layers that a journal has are ignored; each layer that is complete is synced and entered there.
    """

    def __init__(
        self,
        experts: ModelExperts,
        quantizer: Quantizer,
        writer: StoreWriter,
        progress: Callable[[int], object] = lambda projections: None,  # not called for layers of the journal
        journal: Journal | None = None,
    ) -> None:
        self.experts = experts
        self._errors = ErrorTally(experts)
        self._quantizer, self._writer, self._journal, self._progress = quantizer, writer, journal, progress
        self._threads = SideBySide(self._done)
        each = experts.num_experts * len(experts.projections)
        self._left = dict.fromkeys(range(len(experts.layers)), each)  # projections of each layer that are not packed
        for layer, counted in {} if journal is None else journal.layers.items():
            self._errors.restore(layer, counted)
            self._left[layer] = 0
        biased = any(fmt.bias for fmt in experts.formats.values())
        self._kinds = {"weight": "expert projections"} | ({"bias": "biases of experts"} if biased else {})
        self._missing: dict[Place, dict[str, Any]] = {
            (layer, expert, projection): {}
            for layer, left in self._left.items()
            if left
            for expert in range(experts.num_experts)
            for projection in experts.projections
        }

    def put(self, layer: int, expert: int, projection: Projection, weight: Given) -> None:
        """Take one weight, [rows, columns] on any device.

        Raises its StoreError, or that of an earlier one.
        """
        weight = weight.cpu() if isinstance(weight, Tensor) else weight
        self._take((layer, expert, projection), "weight", weight)

    def put_bias(self, layer: int, expert: int, projection: Projection, bias: Tensor) -> None:
        """Take one bias, [rows] on any device; otherwise like ``put``."""
        self._take((layer, expert, projection), "bias", bias.to("cpu", copy=True))

    def _take(self, place: Place, kind: str, given: Given) -> None:
        if self._journal is not None and place[0] in self._journal.layers:
            return
        parts = self._missing.setdefault(place, {})
        parts[kind] = given
        if parts.keys() != self._kinds.keys():
            return
        del self._missing[place]
        weight = parts["weight"]

        def pack(layer: int) -> None:
            matrix = (weight() if callable(weight) else weight), parts.get("bias")
            pack_projection(self.experts, place, matrix, self._quantizer, self._writer, self._errors)

        form = next(iter(self.experts.formats.values())).matrices[place[2]]
        each = _BYTES_OF_QUANTIZED if isinstance(weight, Tensor) else _BYTES_OF_HELD
        self._threads.submit(each * form.rows * form.columns, pack, place[0])

    def _done(self, layer: int) -> None:
        self._progress(1)
        self._left[layer] -= 1
        if self._journal is not None and self._left[layer] == 0:
            self._journal.add(layer, self._errors.of_layer(layer))

    def finish(self) -> FileStore:
        """Complete the store; StoreError if a projection is missing or cannot be stored."""
        self._threads.wait()
        for kind, what in self._kinds.items():
            if missing := [place for place, parts in self._missing.items() if kind not in parts]:
                raise StoreError(
                    f"the checkpoint lacks {len(missing)} {what}, the first being that of the "
                    f"{_name(self.experts, min(missing))}; download it again."
                )
        self._threads.close()
        return self._writer.finish(self._errors.record())

    def stop(self, error: BaseException) -> None:
        """Stop after an error, as ``leave``, or because the start ends."""
        with contextlib.suppress(Exception):  # of a piece; the next start meets it again
            self._threads.wait()
        self._threads.close()  # no thread may write to the files from now on
        leave(self._writer, error)


def _name(experts: ModelExperts, place: Place) -> str:
    return f"{place[2].name.lower()} projection of expert {place[1]} in layer {experts.layers[place[0]]}"
