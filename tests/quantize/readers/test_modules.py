"""How rules, groups, targets and exclusions match the names of experts."""

import pytest
import torch

from tests.quantize.readers.test_configurations import (
    AWQ,
    BLOCKS,
    DENSE,
    EXPERTS,
    FP8,
    GPTQ,
    GROUP4,
    NVFP4,
    PLAIN_FP8,
    PLAIN_NVFP4,
    QUARK4,
    QUARK8,
    ROUND,
    groups,
    mixed,
    modelopt,
    pack_quantized,
    quark,
)
from vllm_dymoe.experts.encoding import MXFP4, PLAIN, STEPS
from vllm_dymoe.experts.format import ExpertFormat, Projection
from vllm_dymoe.quantize.readers import make_reader
from vllm_dymoe.quantize.readers.base import kept_format, own_formats
from vllm_dymoe.quantize.readers.modules import modules_of
from vllm_dymoe.quantize.tensors import CheckpointError

LAYERS = 3
PARTS = {"qweight": "I32", "qzeros": "I32", "scales": "F16"}
SYMMETRIC = GPTQ | {"sym": True, "desc_act": False}
FOUR = STEPS[4]


def experts(stem="model.layers.{}.mlp.experts", *, words=("gate_proj", "up_proj", "down_proj"), plain=(), count=8):
    """Return names and dtypes of a quantized model's tensors.

    ``plain`` lists parts of names that stay at 16 bits.
    """
    modules = [f"{stem.format(n)}.{e}.{word}" for n in range(LAYERS) for e in range(count) for word in words]
    return {
        f"{module}.{part}": dtype
        for module in modules
        for part, dtype in ({"weight": "BF16"} if any(p in f"{module}." for p in plain) else PARTS).items()
    }


def read(config, tensors):
    """Return the encodings of the model's experts and of its drafts'."""
    model, drafts = modules_of(tensors, LAYERS)
    return make_reader(config, model).encoding, make_reader(config, drafts).encoding


DRAFT = {"mtp.layers.0.mlp.experts.0.up_proj.weight": "BF16", "mtp.fc.weight": "BF16"}
BEHIND = {f"model.layers.{LAYERS}.mlp.experts.0.up_proj.weight": "BF16"}
SAID = {
    "rules of attention and the head": (
        SYMMETRIC | {"dynamic": {r".*self_attn.*": {"bits": 8}, "lm_head": {"bits": 8}, r"-:.*shared_expert.*": {}}},
        experts(),
        FOUR,
    ),
    "rules that repeat the global values": (SYMMETRIC | {"dynamic": {r"+:.*": {"bits": 4}}}, experts(), FOUR),
    "a rule for all experts": (SYMMETRIC | {"dynamic": {r".*\.experts\..*": {"bits": 8}}}, experts(), STEPS[8]),
    "a rule of another model's experts": (
        SYMMETRIC | {"dynamic": {r"^talker\..*": {"bits": 8}}},
        experts("thinker.model.layers.{}.mlp.experts"),
        FOUR,
    ),
    "AutoRound names other modules": (
        ROUND
        | {"extra_config": {"model.layers.0.mlp.shared_expert.up_proj": {"bits": 8}, ".*self_attn.*": {"bits": 8}}},
        experts(),
        FOUR,
    ),
    "AutoRound by an expression": (ROUND | {"extra_config": {r".*experts.*": {"bits": 8}}}, experts(), STEPS[8]),
    "an anchored target, transformers' older names": (
        groups(DENSE, ([r"re:^language_model\.model\.layers\.\d+\.mlp\.experts"], *EXPERTS[1:])),
        experts("model.language_model.layers.{}.mlp.experts"),
        NVFP4,
    ),
    "an anchored target, Qwen3-Omni's": (
        groups(DENSE, ([r"re:^thinker\.model.*experts\.\d+\.(gate|up|down)_proj$"], *EXPERTS[1:])),
        experts("thinker.model.layers.{}.mlp.experts"),
        NVFP4,
    ),
    "an anchored target, Nemotron-H's": (
        groups(DENSE, ([r"re:^backbone\.layers\.\d+\.mixer\.experts"], *EXPERTS[1:])),
        experts("backbone.layers.{}.mixer.experts", words=("up_proj", "down_proj")),
        NVFP4,
    ),
    "transformers' newer words for Mixtral": (
        groups(DENSE, ([r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"], *EXPERTS[1:])),
        experts("model.layers.{}.block_sparse_moe.experts", words=("w1", "w2", "w3")),
        NVFP4,
    ),
    "the first group that names them": (groups(EXPERTS, (["re:.*layers.0.*"], *DENSE[1:])), experts(), NVFP4),
    "a group for other layers": (groups(DENSE, (["re:.*self_attn.*"], *EXPERTS[1:])), experts(), FP8),
    "Quark's pattern": (
        quark(QUARK8, **{"*.block_sparse_moe.experts.*": QUARK4}),
        experts("model.layers.{}.block_sparse_moe.experts", words=("w1", "w2", "w3")),
        MXFP4,
    ),
    "16-bit experts": (AWQ | {"modules_to_not_convert": ["mlp.experts"]}, experts(plain=["experts"]), PLAIN),
    "16-bit experts, by name": (modelopt("NVFP4", ignore=["*.mlp.experts*"]), experts(plain=["experts"]), PLAIN),
    "16-bit experts, unsaid": (BLOCKS, experts(plain=["experts"]), PLAIN),
    "ModelOpt, of parts": (
        mixed(model__layers__0__self_attn__q_proj=PLAIN_FP8)
        | {"quantized_layers": {f"model.layers.{n}.mlp.experts": PLAIN_NVFP4 for n in range(LAYERS)}},
        experts(),
        NVFP4,
    ),
    "ModelOpt, one by one": (
        modelopt("MIXED_PRECISION", quantized_layers={n.rpartition(".")[0]: PLAIN_NVFP4 for n in experts()}),
        experts(),
        NVFP4,
    ),
    "weights alone": (pack_quantized(GROUP4, input_activations={"num_bits": 8}), experts(), FOUR),
}


@pytest.mark.parametrize(("config", "tensors", "encoding"), SAID.values(), ids=SAID)
@pytest.mark.parametrize("draft", [{}, DRAFT, BEHIND], ids=["no draft", "mtp", "behind the last layer"])
def test_what_is_said_of_the_experts(config, tensors, encoding, draft):
    assert read(config, tensors | draft) == (encoding, PLAIN)


MIXED = {
    "a layer": (SYMMETRIC | {"dynamic": {r".*layers\.1\..*": {"bits": 8}}}, experts(), {1: "8"}, "4"),
    "a projection": (SYMMETRIC | {"dynamic": {r".*down_proj": {"bits": 8}}}, experts(), {Projection.DOWN: "8"}, "4"),
    "a projection's groups and zeros": (
        SYMMETRIC | {"dynamic": {r".*down_proj": {"group_size": 32, "sym": False}}},
        experts(),
        {Projection.DOWN: "4"},
        "4",
    ),
    "a 16-bit layer": (AWQ, experts(plain=["layers.2."]), {2: "16"}, "4"),
    "a 16-bit projection": (AWQ, experts(plain=["down_proj."]), {Projection.DOWN: "16"}, "4"),
    "groups": (groups((["re:.*layers.0.*"], *DENSE[1:]), EXPERTS), experts(), {0: "fp8"}, "nvfp4"),
    "Quark": (quark(QUARK4, **{"*.down_proj": QUARK8}), experts(), {Projection.DOWN: "fp8"}, "mxfp4"),
    "ModelOpt": (
        mixed(model__layers__0__mlp__experts=PLAIN_NVFP4, model__layers__1__mlp__experts=PLAIN_FP8)
        | {"quant_method": "modelopt"},
        {name: dtype for name, dtype in experts().items() if ".2." not in name},
        {1: "fp8"},
        "nvfp4",
    ),
}


@pytest.mark.parametrize(("config", "tensors", "other", "most"), MIXED.values(), ids=MIXED)
def test_layers_and_projections_may_have_a_format_of_their_own(config, tensors, other, most):
    model, _ = modules_of(tensors, LAYERS)
    reader = make_reader(config, model)
    assert reader.mixed
    for module in model:
        (projection,) = module.projections
        by_projection = any(isinstance(key, Projection) for key in other)
        expected = other.get(projection if by_projection else module.layer, most)
        assert reader.at(module.layer, projection).encoding.name == expected, module.name


@pytest.mark.parametrize(("config", "tensors", "other", "most"), MIXED.values(), ids=MIXED)
def test_a_store_of_one_version_holds_every_layer_in_its_own_format(config, tensors, other, most):
    reader = make_reader(config, modules_of(tensors, LAYERS)[0])
    bits = reader.usual[0].bits
    assert reader.keeps((bits,))
    assert not reader.keeps((16 if bits < 16 else 8,))
    assert not reader.keeps((16, bits)), "a low version would be made of what they dequantize to"
    like = ExpertFormat(128, 64, PLAIN, 64, torch.bfloat16)
    usual = kept_format(reader.usual, like, 64, 1)
    named = {layer: layer for layer in range(LAYERS) if any(f".{layer}." in name for name in tensors)}
    own = own_formats(reader, named, usual, 64, 1)
    for layer in named:
        _, up, down = own.get(layer, usual).matrices
        for projection, matrix in ((Projection.UP, up), (Projection.DOWN, down)):
            by_projection = any(isinstance(key, Projection) for key in other)
            assert matrix.encoding.name == other.get(projection if by_projection else layer, most)
            held = reader.at(layer, projection)
            assert (matrix.integer_zeros, matrix.act_order) == (held.asymmetric, held.act_order)
            assert matrix.group_size == held.group_size or not held.group_size


def test_gate_and_up_of_two_formats_have_16_bits_where_they_are():
    """The layer's down projections and all other layers keep their codes."""
    rule = {"dynamic": {r".*layers\.1\..*gate_proj": {"bits": 8}}}
    reader = make_reader(SYMMETRIC | rule, modules_of(experts(), LAYERS)[0])
    assert reader.mixed
    assert reader.keeps((4,))
    usual = kept_format(reader.usual, ExpertFormat(128, 64, PLAIN, 64, torch.bfloat16), 64, 1)
    own = own_formats(reader, {layer: layer for layer in range(LAYERS)}, usual, 64, 1)
    assert [[matrix.encoding for matrix in own.get(n, usual).matrices] for n in range(LAYERS)] == [
        [FOUR, FOUR, FOUR],
        [PLAIN, PLAIN, FOUR],
        [FOUR, FOUR, FOUR],
    ]


REFUSED = {
    "an expert": (ROUND | {"extra_config": {"layers.1.mlp.experts.5.up_proj": {"bits": 8}}}, experts(), r"experts\.5"),
    "a 16-bit expert": (
        AWQ,
        experts(plain=["layers.2.mlp.experts.7.up_proj."]),
        r"layers\.2\.mlp\.experts\.7\.up_proj",
    ),
}


@pytest.mark.parametrize(("config", "tensors", "where"), REFUSED.values(), ids=REFUSED)
def test_experts_of_a_layer_with_several_formats_are_refused_with_the_place(config, tensors, where):
    with pytest.raises(CheckpointError, match=where) as caught:
        read(config, tensors)
    assert "download" not in str(caught.value)  # the checkpoint is complete, so downloading again would not help
