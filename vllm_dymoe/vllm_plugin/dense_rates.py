"""Times a checkpoint's quantized layers with what vLLM will compute them with.

This is a child process of :mod:`vllm_dymoe.plan.machine`, run with ``python -m`` and a job. vLLM reads config.json,
and makes the layers as it does when it serves them, so its choice among its kernels and ours counts. Its last line is
a JSON object; an error ends it with a sentence.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import ColumnParallelLinear, UnquantizedLinearMethod

from vllm_dymoe.plan.machine import ROWS, Others, typical
from vllm_dymoe.vllm_plugin.threads import keep_to_quota

_LONGEST = 2.0  # seconds in which layers are made: of large ones there may be fewer than asked for
_SHORTEST = 1.0  # seconds in which they are timed: the system counts the time that others take in hundredths of one
_LARGEST_BYTE = 0x38  # FP8's code of 1.0: no code below it is infinite or NaN
_ONE = 0x7F  # the code of 1.0 in a scale that is an exponent


def rates_of(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kernel's name, weights per second by ``ROWS``, and others' share.

    Args:
        job: ``model`` is the folder of a config.json, ``layer`` the name of a matrix, with ``rows`` and ``columns``,
            and ``count`` the number of such matrices that take turns.

    Raises:
        SystemExit: vLLM computes the layer with 16 bits.
    """
    engine: dict[str, Any] = {"quantization": "dymoe", "additional_config": {"dymoe": {}}, "max_model_len": 128}
    config = EngineArgs(model=job["model"], **engine).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/rank", backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        dtype = config.model_config.dtype
        torch.set_default_dtype(dtype)
        keep_to_quota("cpu", 1)
        begun, layers = time.perf_counter(), list[Any]()
        while len(layers) < job["count"] and (not layers or time.perf_counter() - begun < _LONGEST):
            layers.append(_made(config, job))
        steps = [partial(_step, layers, torch.randn(tokens, job["columns"], dtype=dtype)) for tokens in ROWS]
        for step in steps:
            step()
        timed, others, begun = list[list[float]](), Others(), time.perf_counter()
        while time.perf_counter() - begun < _SHORTEST:
            timed.append([typical(step, 8) for step in steps])
    weights = len(layers) * job["rows"] * job["columns"]
    rates = [weights / statistics.median(seconds) for seconds in zip(*timed, strict=True)]
    return {"kernel": _kernel(layers[0]), "rates": rates, "others": others.share()}


def _step(layers: Sequence[Any], x: torch.Tensor) -> None:
    for layer in layers:
        layer.quant_method.apply(layer, x)


def _made(config: VllmConfig, job: Mapping[str, Any]) -> Any:
    """Return a layer as vLLM makes it, with random weights."""
    layer = ColumnParallelLinear(
        job["columns"], job["rows"], bias=False, params_dtype=config.model_config.dtype,
        quant_config=config.quant_config, prefix=job["layer"],
    )  # fmt: skip
    if isinstance(layer.quant_method, UnquantizedLinearMethod):
        raise SystemExit(f"vLLM computes {job['layer']} at 16 bits.")
    for name, parameter in layer.named_parameters():
        data = parameter.data
        if data.is_floating_point() and data.element_size() > 1:
            data.fill_(1 / job["columns"])
        elif "scale" in name and data.dtype is torch.float8_e4m3fn:
            data.copy_(torch.ones(data.shape, dtype=torch.float32))
        elif "scale" in name:
            data.view(torch.uint8).fill_(_ONE)
        else:
            data.view(torch.uint8).random_(0, _LARGEST_BYTE)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def _kernel(layer: Any) -> str:
    """Return the name of a layer's kernel, or of its method if that has none."""
    owners = layer.quant_method, getattr(layer, "scheme", None)
    kinds = [type(value).__name__ for owner in owners if owner is not None for value in vars(owner).values()]
    return next((name for name in kinds if name.endswith("Kernel")), type(layer.quant_method).__name__)


if __name__ == "__main__":
    print(json.dumps(rates_of(json.loads(sys.argv[1]))))
