"""Packing all experts of a checkpoint: side by side, each on one core.

Quantizing is many small operations: spreading each of them over the cores costs more in waiting than it gains. At most
two pieces of work for each core are in memory: projections, or with a calibration whole experts, because what the down
projection reads follows from the other two.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from vllm_dymoe.experts.layout import ModelExperts, Projection
from vllm_dymoe.quantize import make_quantizer
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.errors import ErrorTally
from vllm_dymoe.quantize.experts import ExpertPacker, Sink
from vllm_dymoe.quantize.journal import Journal
from vllm_dymoe.quantize.prequantized import PrequantizedMatrix
from vllm_dymoe.store import ErrorRecord

FALLBACK = "hqq"
"""What quantizes the experts that a calibration saw too rarely."""

Progress = Callable[[int], None]
Work = Callable[[ExpertPacker], int]
"""Puts something into a packer, and returns its bytes in the checkpoint."""


def pack(
    checkpoint: Checkpoint, experts: ModelExperts, quantizer: str, sink: Sink, progress: Progress = lambda nbytes: None
) -> ErrorRecord:
    """Quantize every projection by itself.

    Args:
        checkpoint: the source.
        experts: what the store will hold.
        quantizer: its name.
        sink: where packed sections go.
        progress: called with every number of source bytes done.

    Raises:
        CheckpointError: the source cannot be read.
        StoreError: experts cannot be quantized.
    """
    errors = ErrorTally(experts)
    work = (partial(_put, *projection) for projection in checkpoint.projections())
    _side_by_side(work, experts, quantizer, sink, progress, errors)
    return errors.record()


def pack_calibrated(
    checkpoint: Checkpoint,
    experts: ModelExperts,
    calibration: Calibration,
    sink: Sink,
    journal: Journal,
    sync: Callable[[int], None],
    progress: Progress = lambda nbytes: None,
) -> ErrorRecord:
    """Quantize every expert with GPTQ for the inputs it had, and those that had too few with HQQ.

    Args:
        checkpoint: the source.
        experts: what the store will hold.
        calibration: of this checkpoint.
        sink: where packed sections go.
        journal: which layers are there already; each that is packed is added.
        sync: makes a layer durable, before it is added.
        progress: called with every number of source bytes done.

    Raises:
        CheckpointError: the source cannot be read.
        CalibrationError: the calibration cannot be used.
        StoreError: experts cannot be quantized.
    """
    errors = ErrorTally(experts)
    for layer in range(len(experts.layers)):
        if layer in journal.layers:
            errors.restore(layer, journal.layers[layer])
            progress(checkpoint.layer_bytes(layer))
            continue
        rare = [
            expert for expert, tokens in enumerate(calibration.tokens(layer).tolist()) if tokens < calibration.enough
        ]
        for expert in rare:
            errors.fell_back(layer, expert)
        work = (
            partial(_put_expert, checkpoint, None if expert in rare else calibration, layer, expert)
            for expert in range(experts.num_experts)
        )
        _side_by_side(work, experts, FALLBACK, sink, progress, errors)
        sync(layer)
        journal.add(layer, errors.of_layer(layer))
    return errors.record()


def _put(
    layer: int,
    expert: int,
    projection: Projection,
    weight: torch.Tensor | PrequantizedMatrix,
    bias: torch.Tensor | None,
    packer: ExpertPacker,
) -> int:
    packer.put(layer, expert, projection, weight)
    if bias is None:
        return weight.nbytes
    packer.put_bias(layer, expert, projection, bias)
    return weight.nbytes + bias.nbytes


def _put_expert(
    checkpoint: Checkpoint, calibration: Calibration | None, layer: int, expert: int, packer: ExpertPacker
) -> int:
    matrices = checkpoint.expert(layer, expert)
    outer, inner = calibration.curvatures(layer, expert, matrices) if calibration else (None, None)
    nbytes = 0
    for projection, (weight, bias) in matrices.items():
        packer.put(layer, expert, projection, weight, inner if projection is Projection.DOWN else outer)
        nbytes += weight.nbytes
        if bias is not None:
            packer.put_bias(layer, expert, projection, bias)
            nbytes += bias.nbytes
    return nbytes


def _side_by_side(
    work: Iterable[Work], experts: ModelExperts, quantizer: str, sink: Sink, progress: Progress, errors: ErrorTally
) -> None:
    cores = len(os.sched_getaffinity(0))
    own = threading.local()

    def do(piece: Work) -> int:
        if not hasattr(own, "packer"):
            own.packer = ExpertPacker(experts, make_quantizer(quantizer), sink, errors=errors)
        return piece(own.packer)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pool = ThreadPoolExecutor(cores)
    pending: deque[Future[int]] = deque()
    try:
        for piece in work:
            pending.append(pool.submit(do, piece))
            if len(pending) == 2 * cores:
                progress(pending.popleft().result())
        while pending:
            progress(pending.popleft().result())
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
