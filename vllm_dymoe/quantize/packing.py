"""Packing all experts of a checkpoint, side by side.

Whole experts are the pieces of work, because what a down projection reads follows from the other two.
"""

import contextlib
from collections.abc import Callable, Iterator

from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.error_tally import ErrorTally
from vllm_dymoe.quantize.journal import Journal
from vllm_dymoe.quantize.packer import pack_projection
from vllm_dymoe.quantize.side_by_side import SideBySide
from vllm_dymoe.residency.format import ModelExperts, Projection
from vllm_dymoe.store import ErrorRecord
from vllm_dymoe.store.writer import StoreWriter

FALLBACK = "hqq"
"""What quantizes the experts that a calibration saw too rarely."""


def pack(
    checkpoint: Checkpoint,
    experts: ModelExperts,
    quantizer: str,
    writer: StoreWriter,
    calibration: Calibration | None = None,
    journal: Journal | None = None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> ErrorRecord:
    """Pack every expert.

    Args:
        calibration: for GPTQ. Experts that it saw too rarely are quantized with HQQ.
        journal: which layers are packed already; each that is packed and synced is added.
        progress: called with every number of source bytes done.

    Raises:
        CheckpointError: the source cannot be read.
        CalibrationError: the calibration cannot be used.
        StoreError: experts cannot be quantized, or the store cannot be written.
    """
    errors = ErrorTally(experts)
    chosen = make_quantizer(quantizer if calibration is None else FALLBACK)
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
        if calibration is not None and expert not in rare[layer]:
            outer, inner = calibration.curvatures(layer, expert, matrices)
        for projection, matrix in matrices.items():
            curvature = inner if projection is Projection.DOWN else outer
            pack_projection(experts, (layer, expert, projection), matrix, chosen, writer, errors, curvature)

    def done(layer: int, expert: int) -> None:
        progress(checkpoint.layer_bytes[layer] // experts.num_experts)
        if journal is not None and expert == experts.num_experts - 1:
            writer.sync(layer)
            journal.add(layer, errors.of_layer(layer))

    # Closed here: whoever catches an error may close the writer's files, and by then no thread may write to them.
    with contextlib.closing(SideBySide(done)) as cores:
        for layer, expert in work():
            cores.submit(checkpoint.layer_bytes[layer] // experts.num_experts, do, layer, expert)
        cores.wait()
    return errors.record()
