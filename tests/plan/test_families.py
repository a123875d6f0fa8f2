"""Sizes from config.json, compared with the weights of every known family."""

from math import prod

import pytest
import torch
import transformers

from vllm_dymoe.plan.model import attention_of, shape_of

WHY = "needs the vLLM that models are tried with"
by_hand = pytest.importorskip("tests.e2e.by_hand", reason=WHY, exc_type=ImportError)
from tests.e2e.architectures import COMMON, NEMOTRON_H  # noqa: E402

MODELS = by_hand.MORE | by_hand.ARCHITECTURES | by_hand.HANDMADE | {"nemotron-h": NEMOTRON_H}
LEFT_OUT = {"dbrx", "longcat"}  # without vLLM's MoE layer; with weights of experts that compute nothing
WITHOUT_WEIGHTS = {name for name, model in MODELS.items() if getattr(model, "shapes", True) == {}}
PUBLISHED = {"hunyuan-moe": {"num_shared_expert": [1, 1]}}  # what transformers takes for granted


def described(name):
    """Return a model's config.json, and the shapes of its weights by name."""
    model = MODELS[name]
    if name in by_hand.HANDMADE:
        return COMMON | model.config, model.shapes
    config = getattr(transformers, model.config)(**(COMMON | model.sizes))
    with torch.device("meta"):
        weights = transformers.AutoModelForCausalLM.from_config(config).named_parameters()
    known = type(config)().to_dict()  # sizes that other families have are no part of it
    said = {key: value for key, value in config.to_dict().items() if key in known}
    if "mlp_layer_types" in model.sizes:
        said.pop("first_k_dense_replace", None)  # of the class, for more layers
    return said | model.written | PUBLISHED.get(name, {}), {name: tuple(tensor.shape) for name, tensor in weights}


def of_experts(name, shape):
    return (".experts." in name or len(shape) == 3) and "conv" not in name


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LEFT_OUT - WITHOUT_WEIGHTS))
def test_every_weight_is_counted(name):
    config, shapes = described(name)
    odd = "bias", "indexer", "compressor", "hc_", "tid2eid"  # parts of sparse attention, and streams, are not counted
    matrices = {name: of for name, of in shapes.items() if len(of) > 1 and not any(word in name for word in odd)}
    experts = sum(prod(shape) for name, shape in matrices.items() if of_experts(name, shape))
    dense = sum(prod(shape) for name, shape in matrices.items() if not of_experts(name, shape))
    shape = shape_of(config, name)
    assert shape.moe_layers * shape.experts * shape.expert_weights == experts
    if attention_of(config) != "recurrent":
        assert shape.dense_weights == pytest.approx(dense, rel=0.1)
