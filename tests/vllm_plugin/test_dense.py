"""Dense layers that are quantized while they load."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from tests.vllm_plugin.test_prepare import configure
from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.matrix import MatrixFormat
from vllm_dymoe.kernels import dequantize, native
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.vllm_plugin import dense, dense_fp8

needs_the_library = pytest.mark.skipif(native.load() is None, reason="the native library was not built")


def layer_of(kind, rows=200, columns=96, dtype=torch.bfloat16):
    layer = kind.__new__(kind)
    torch.nn.Module.__init__(layer)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def config(*, tied=False, head_dtype=None):
    text = SimpleNamespace(tie_word_embeddings=tied)
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, head_dtype=head_dtype, hf_text_config=text)
    )


@needs_the_library
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_packed_layer_computes_what_its_codes_stand_for_and_gives_its_weights_back(bits, dtype):
    layer, options = layer_of(LinearBase, dtype=dtype), Options(dense=bits, group_size=32)
    method = dense.packed_method(layer, "model.layers.0.self_attn.qkv_proj", options, config())
    exact = layer.weight.double()
    method.process_weights_after_loading(layer)
    assert layer.weight.numel() == 0
    fmt = MatrixFormat(200, 96, encoding_of(bits), 32, dtype)
    weights = dequantize(fmt.view(layer.packed), torch.float64)
    assert (weights - exact).abs().max() <= 8 / 2**bits
    x, bias = torch.randn(2, 300, 96).to(dtype), torch.randn(200).to(dtype)
    out = method.apply(layer, x, bias)
    want = (x.double() @ weights.T).to(dtype) + bias
    torch.testing.assert_close(out, want, rtol=2**-6, atol=2**-4)
    alone = torch.cat([method.apply(layer, row[None], bias) for row in x.flatten(0, 1)])
    assert torch.equal(alone, out.flatten(0, 1)), "a token's bits depend on no other token"


def test_which_layers_are_packed():
    options, linear = Options(dense=8), layer_of(LinearBase)
    for name, packed in (
        ("model.layers.0.self_attn.o_proj", True),
        ("model.layers.0.mlp.shared_expert.down_proj", True),
        ("model.layers.0.mlp.gate", False),
        ("model.layers.0.mlp.shared_expert_gate", False),
        ("model.layers.0.self_attn.kv_b_proj", False),
        ("model.layers.0.linear_attn.conv1d", False),
        ("language_model.model.layers.0.self_attn.o_proj", True),
        ("visual.blocks.0.attn.qkv", False),
        ("vision_tower.encoder.layers.0.self_attn.qkv_proj", False),
        ("multi_modal_projector.down_proj", False),
        ("audio_tower.layers.0.self_attn.out_proj", False),
    ):
        assert (dense.packed_method(linear, name, options, config()) is not None) == packed, name
    head = layer_of(ParallelLMHead)
    assert dense.packed_method(head, "lm_head", options, config()) is not None
    assert dense.packed_method(head, "lm_head", options, config(head_dtype=torch.float32)) is None
    assert dense.packed_method(linear, "o_proj", Options(), config()) is None


@needs_the_library
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_is_the_embedding_too_keeps_its_weights(tied):
    head = layer_of(ParallelLMHead)
    method = dense.packed_method(head, "lm_head", Options(dense=8), config(tied=tied))
    method.process_weights_after_loading(head)
    assert bool(head.weight.numel()) == tied
    assert method.apply(head, torch.randn(3, 96).bfloat16()).shape == (3, 200)


def test_what_dense_cannot_do_is_refused(monkeypatch):
    options = Options(dense=8)
    dense.check_dense(Options(), quantized=True)
    with pytest.raises(ConfigError, match="quantized already"):
        dense.check_dense(options, quantized=True)
    monkeypatch.setattr(native, "load", lambda: None)
    with pytest.raises(ConfigError, match="native library"):
        dense.check_dense(options, quantized=False)


class Gpu:
    """The part of a CUDA platform that the plugin reads; vLLM itself sees the CPU."""

    def __init__(self, capability):
        self.capability = capability

    def is_cpu(self):
        return False

    def has_device_capability(self, least):
        return self.capability >= least


@pytest.fixture
def on_gpu(monkeypatch):
    def become(capability):
        for module in (dense, dense_fp8):
            monkeypatch.setattr(module, "current_platform", Gpu(capability))

    return become


@pytest.fixture
def vllm_config(monkeypatch):
    """Set the configuration, dtype and rank with which vLLM creates layers."""
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(configure(dtype=torch.bfloat16)):
        yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(("capability", "name"), [(90, "Fp8Ptpc"), (89, "Fp8Ptpc"), (86, "Fp8PerTensor")])
def test_a_gpu_takes_vllms_online_fp8_for_the_same_layers(capability, name, on_gpu, vllm_config):
    on_gpu(capability)
    options = Options(dense=8)
    dense.check_dense(options, quantized=False)
    method = dense.packed_method(layer_of(LinearBase), "model.layers.0.self_attn.o_proj", options, config())
    assert type(method).__name__.startswith(name)
    assert dense.packed_method(layer_of(LinearBase), "model.layers.0.mlp.gate", options, config()) is None
    head = layer_of(ParallelLMHead)
    assert isinstance(dense.packed_method(head, "lm_head", options, config()), dense_fp8.Fp8HeadMethod)
    assert dense.packed_method(head, "lm_head", options, config(tied=True)) is None
    assert dense.packed_method(layer_of(LinearBase), "o_proj", Options(), config()) is None


def test_what_a_gpu_cannot_do_is_refused(on_gpu, monkeypatch):
    on_gpu(90)
    with pytest.raises(ConfigError, match="set dense to 8"):
        dense.check_dense(Options(dense=4), quantized=False)
    with pytest.raises(ConfigError, match="quantized already"):
        dense.check_dense(Options(dense=8), quantized=True)
    monkeypatch.setattr(dense, "online_fp8", lambda: None)
    with pytest.raises(ConfigError, match="newer"):
        dense.check_dense(Options(dense=8), quantized=False)


class Product:
    """Replaces vLLM's FP8 product, which a CPU may lack.

    The weight is [columns, rows] with a scale for each row.
    """

    def process_weights_after_loading(self, layer):
        assert layer.weight.dtype is torch.float8_e4m3fn

    def input_quant_key(self):
        """Return None: the product quantizes its input itself."""

    def apply_weights(self, layer, x, bias):
        out = x.double() @ (layer.weight.double() * layer.weight_scale.double().reshape(1, -1))
        return (out if bias is None else out + bias.double()).to(x.dtype)


def test_a_head_becomes_fp8_and_gives_its_weight_back(on_gpu, vllm_config, monkeypatch):
    """vLLM's own method quantizes; its rounding is compared with the 16-bit weight."""
    on_gpu(90)
    monkeypatch.setattr(dense_fp8.online_fp8(), "init_fp8_linear_kernel", lambda **given: Product())
    head = layer_of(ParallelLMHead)
    exact = head.weight.double()
    method = dense.packed_method(head, "lm_head", Options(dense=8), config())
    method.process_weights_after_loading(head)
    assert head.weight.numel() == 0
    x = torch.randn(3, 96).bfloat16()
    out, want = method.apply(head, x), x.double() @ exact.T
    assert out.shape == (3, 200)
    # With a mantissa of 3 bits, each weight is off by at most 1/16 of itself.
    assert 1e-3 < (out.double() - want).norm() / want.norm() < 1 / 16
