"""Layers of quantized checkpoints are timed with the kernel that will serve them."""

import pytest
import torch
from vllm.distributed import cleanup_dist_env_and_memory

from tests.quantize.readers.kinds import FLOATS, INTEGERS
from tests.vllm_plugin.test_prepare import with_quantization_config
from vllm_dymoe.kernels import native
from vllm_dymoe.plan.machine import ROWS
from vllm_dymoe.vllm_plugin.dense_rates import rates_of

pytestmark = pytest.mark.skipif(native.load() is None, reason="the native library was not built")
JOB = {"layer": "model.layers.0.self_attn.o_proj", "rows": 384, "columns": 256, "count": 4}


@pytest.fixture(autouse=True)
def _clean():
    yield
    torch.set_default_dtype(torch.float32)
    cleanup_dist_env_and_memory()


def rates(said, folder):
    return rates_of({**JOB, "model": str(with_quantization_config(folder, said))})


@pytest.mark.parametrize(("kind", "kernel"), [
    ("awq", "IntegerKernel"), ("gptq", "IntegerKernel"), ("compressed-tensors", "IntegerKernel"),
    ("fp8-blocks", "Fp8BlockKernel"), ("fp8-compressed-tensors", "Fp8Kernel"),
])  # fmt: skip
def test_the_kernel_that_serves_is_timed(tmp_path, amx, kind, kernel):
    """Without AMX it is the plugin's own."""
    found = rates({**FLOATS, **{name: config for name, (config, *_) in INTEGERS.items()}}[kind], tmp_path)
    assert found["kernel"] == kernel
    assert len(found["rates"]) == len(ROWS)
    assert all(rate > 1e6 for rate in found["rates"])
    assert found["others"] >= 0


def test_a_layer_that_has_16_bits_is_not_timed_as_quantized(tmp_path):
    said = FLOATS["fp8-blocks"] | {"modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}
    with pytest.raises(SystemExit, match="at 16 bits"):
        rates(said, tmp_path)
