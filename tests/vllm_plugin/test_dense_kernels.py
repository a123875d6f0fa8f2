"""Quantized dense layers in vLLM's real layers return the checkpoint's numbers.

The processor must not matter.
"""

from functools import partial

import pytest
import torch
import vllm.model_executor.kernels.linear as registry
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    cleanup_dist_env_and_memory,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights
from vllm.platforms import PlatformEnum

from tests.quantize.readers import kinds
from tests.quantize.readers.kinds import awq, compressed_tensors, gptq, random_integers
from tests.vllm_plugin.test_prepare import configure
from vllm_dymoe.kernels import native
from vllm_dymoe.vllm_plugin.dense_kernels import register_kernels
from vllm_dymoe.vllm_plugin.quant_config import DymoeConfig

pytestmark = pytest.mark.skipif(native.load() is None, reason="the native library was not built")


def pack_quantized(**weights):
    group = {"targets": ["Linear"], "weights": {"type": "int", "strategy": "group", **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "sym": True, "desc_act": False}
SYMMETRIC, ASYMMETRIC = {"symmetric": True}, {"symmetric": False}
INTEGERS = {
    "awq": (AWQ | {"group_size": 64}, awq, 4, 64, {}),
    "awq, one group": (AWQ | {"group_size": -1}, awq, 4, None, {}),
    "gptq": (GPTQ | {"bits": 4, "group_size": 32}, gptq, 4, 32, SYMMETRIC),
    "compressed-tensors": (
        pack_quantized(num_bits=4, group_size=128, **SYMMETRIC), compressed_tensors, 4, 128, SYMMETRIC
    ),
    "compressed-tensors of 8 bits": (
        pack_quantized(num_bits=8, group_size=64, **SYMMETRIC), compressed_tensors, 8, 64, SYMMETRIC
    ),
    "compressed-tensors, asymmetric": (
        pack_quantized(num_bits=4, group_size=64, **ASYMMETRIC), partial(compressed_tensors, **ASYMMETRIC), 4, 64, {}
    ),
}  # fmt: skip
ROWS, COLUMNS = 256, 384


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    with set_current_vllm_config(configure()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('ranks')}/rank", backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def _hidden(amx):
    """Every test has a processor without AMX, unless it changes ``amx``."""


def load_layer(config, tensors, dtype, name="o_proj"):
    """Return a layer of an engine that serves a checkpoint of this configuration."""
    engine = configure(dtype=dtype)
    engine.quant_config = DymoeConfig.from_config(config)
    with set_current_vllm_config(engine), torch.random.fork_rng():
        torch.set_default_dtype(dtype)
        try:
            layer = ColumnParallelLinear(
                COLUMNS, ROWS, bias=False, params_dtype=dtype, quant_config=engine.quant_config,
                prefix=f"model.layers.0.self_attn.{name}",
            )  # fmt: skip
            parameters = dict(layer.named_parameters())
            for end, tensor in tensors.items():
                if end in parameters:
                    parameters[end].weight_loader(parameters[end], tensor)
            layer.quant_method.process_weights_after_loading(layer)
        finally:
            torch.set_default_dtype(torch.float32)
    return layer


def check(layer, weights, dtype):
    x = torch.randn(17, COLUMNS, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, _ = layer(x)
    want = (x.double() @ weights.double().T).to(dtype)
    torch.testing.assert_close(out, want, rtol=2**-7, atol=2**-8)
    assert torch.equal(torch.cat([layer(row[None])[0] for row in x]), out), "a token's bits depend on no other token"


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers(kind):
    config, pack, bits, group_size, settings = INTEGERS[kind]
    matrix = random_integers(ROWS, COLUMNS, group_size, bits=bits, **settings)
    layer = load_layer(config, pack(matrix), torch.float16)
    check(layer, matrix.dequantize(), torch.float16)
    assert sum(p.numel() for n, p in layer.named_parameters() if "shape" not in n and n != "g_idx") == 0


@pytest.mark.parametrize("name", ["o_proj", "kv_b_proj"])
@pytest.mark.parametrize("kind", ["fp8-blocks", "fp8-modelopt", "fp8-compressed-tensors"])
def test_floats(kind, name):
    matrix = kinds.random_floats(kind, ROWS, COLUMNS)
    tensors = kinds.float_parts(kind, matrix) | {"input_scale": torch.tensor(1.0)}
    layer = load_layer(kinds.FLOATS[kind], tensors, torch.bfloat16, name)
    check(layer, matrix.dequantize(), torch.bfloat16)
    if name == "kv_b_proj":  # MLA reads its weight
        read = get_and_maybe_dequant_weights(layer, torch.bfloat16)
        torch.testing.assert_close(read.float(), matrix.dequantize(), rtol=2**-7, atol=2**-8)


def test_a_model_without_the_plugin_keeps_vllms_kernels():
    matrix = random_integers(ROWS, COLUMNS, 64)
    tensors, settings = awq(matrix), AWQ | {"group_size": 64}
    register_kernels()
    with set_current_vllm_config(configure(quantization=None)):
        plain = get_quantization_config("awq").from_config(settings)
        layer = ColumnParallelLinear(COLUMNS, ROWS, bias=False, quant_config=plain, prefix="o_proj")
    assert type(layer.quant_method.kernel).__name__ != "IntegerKernel"
    assert tensors.keys() <= dict(layer.named_parameters()).keys()


@pytest.mark.parametrize(
    ("found", "names"), [(False, ["IntegerKernel", "object"]), (True, ["object", "IntegerKernel"])]
)
def test_vllms_choice_has_them_once_behind_its_own_where_there_is_amx(monkeypatch, amx, found, names):
    amx["found"] = found
    monkeypatch.setattr(registry, "_POSSIBLE_KERNELS", {PlatformEnum.CPU: [object]})
    register_kernels()
    register_kernels()
    assert [kernel.__name__ for kernel in registry._POSSIBLE_KERNELS[PlatformEnum.CPU]] == names
