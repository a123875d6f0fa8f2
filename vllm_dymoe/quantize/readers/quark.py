"""AMD Quark's checkpoints of MXFP4 and FP8, which lie as compressed-tensors' do.

``weight`` uint8 [rows, columns / 2] and ``weight_scale`` uint8 [rows, columns / 32], 2^(byte - 127); or ``weight``
float8_e4m3fn with one scale for the matrix or for each row (vLLM, quantization/quark/quark_moe.py). A layer's format is
that of the first pattern of ``layer_quant_config`` that fits its name, else ``global_quant_config``. Activations stay
at 16 bits.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from vllm_dymoe.quantize.readers.base import Reader
from vllm_dymoe.quantize.readers.fp8 import Fp8Reader
from vllm_dymoe.quantize.readers.mxfp4 import Mxfp4ExpertsReader
from vllm_dymoe.quantize.tensors import CheckpointError

_EXPERTS = tuple(f"model.layers.{layer}.mlp.experts.{{}}.{{}}_proj" for layer in range(128))


def make_quark_reader(config: Mapping[str, Any]) -> Reader:
    """The reader of a ``quantization_config`` of config.json.

    Raises:
        CheckpointError: a format that is not read, or experts of several.
    """
    weights = _weights_of_experts(config)
    kind, scheme = weights.get("dtype"), weights.get("qscheme")
    reader: Reader
    groups = weights.get("group_size"), weights.get("scale_format")
    if (kind, scheme) == ("fp4", "per_group") and groups == (32, "e8m0"):
        reader = Mxfp4ExpertsReader()
    elif kind == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        reader = Fp8Reader({})
    else:
        raise CheckpointError(
            f"the checkpoint is quantized with quark, experts in {kind} {scheme}, and only MXFP4 and fp8_e4m3 by "
            "tensor or channel can be read; use one of those."
        )
    reader.method = "quark"
    return reader


def _weights_of_experts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is said of the weights of all experts, which is one thing."""
    rules = config.get("layer_quant_config") or {}
    found: list[Mapping[str, Any]] = []
    for name in (pattern.format(0, projection) for pattern in _EXPERTS for projection in ("gate", "up", "down")):
        rule = next((rule for pattern, rule in rules.items() if fnmatchcase(name, pattern)), None)
        said = (config.get("global_quant_config") if rule is None else rule) or {}
        weights = said.get("weight") or {}
        if isinstance(weights, list) and len(weights) == 1:
            weights = weights[0]
        if not isinstance(weights, Mapping) or (found and weights != found[0]):
            raise CheckpointError(
                "the checkpoint is quantized with quark, its experts in several formats, which cannot be read; use one "
                "with the same format for all experts."
            )
        found.append(weights)
    return found[0]
