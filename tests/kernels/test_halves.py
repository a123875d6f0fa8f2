"""The product of codes in two halves: torch's own kernel on the codes put together, to the last bit."""

from importlib.util import find_spec

import pytest
import torch

from tests.kernels.matrices import in_one_section, random_packed
from vllm_dymoe.kernels import int4 as int4_module
from vllm_dymoe.kernels.int4 import Int4Linear, int4_available
from vllm_dymoe.residency.code import NESTED
from vllm_dymoe.residency.matrix import MatrixFormat, PackedMatrix

# Numba alone is not imported here: vLLM would start no engine beside it (kernels/small.py says why).
pytestmark = [
    pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed"),
    pytest.mark.skipif(not int4_available(), reason="torch's int4 kernel reads this layout with AVX512 only"),
]


@pytest.fixture
def halves():
    from vllm_dymoe.kernels import halves

    return halves


def nested_matrix(rows: int, columns: int, group_size: int) -> PackedMatrix:
    return random_packed(MatrixFormat(rows, columns, NESTED[4], group_size, torch.bfloat16))


def whole_product(x: torch.Tensor, packed: PackedMatrix) -> torch.Tensor:
    whole = in_one_section(packed)
    return torch._weight_int4pack_mm_for_cpu(x, whole.byte_rows, whole.format.group_size, whole.scales_zeros)


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 56])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_are_those_of_torchs_kernel(halves, group_size, tokens, threads, monkeypatch):
    monkeypatch.setattr(halves, "_FEWEST_BYTES", 1)  # so that these share the work, however little it is
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    packed = nested_matrix(320, 512, group_size)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    assert torch.equal(halves.product(x, packed), whole_product(x, packed))


def test_inputs_that_are_no_numbers_stay_what_torch_makes_of_them(halves):
    packed = nested_matrix(64, 64, 32)
    x = torch.randn(5, 64).bfloat16()
    x[1, 3], x[2, 5], x[3] = torch.inf, torch.nan, 1e30
    got, want = halves.product(x, packed), whole_product(x, packed)
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_without_torchs_threads_one_computes(halves, monkeypatch):
    monkeypatch.setattr(halves, "_FEWEST_BYTES", 1)
    monkeypatch.setattr(halves, "_torch_threads", lambda: None)
    packed, x = nested_matrix(192, 256, 64), torch.randn(2, 256).bfloat16()
    assert torch.equal(halves.product(x, packed), whole_product(x, packed))


def test_without_numba_halves_are_put_together_first(monkeypatch):
    monkeypatch.setattr(int4_module, "_product_of_halves", lambda: None)
    packed, x = nested_matrix(192, 256, 64), torch.randn(3, 256).bfloat16()
    for workspace in (1 << 20, 1 << 15):  # all blocks at once, or some at a time
        linear = Int4Linear(torch.empty(workspace, dtype=torch.uint8))
        assert torch.equal(linear(x, packed), whole_product(x, packed))
    assert not Int4Linear(torch.empty(64, dtype=torch.uint8)).supports(packed.format)


def test_what_is_compiled_needs_no_workspace():
    packed, x = nested_matrix(64, 256, 64), torch.randn(3, 256).bfloat16()
    linear = Int4Linear(torch.empty(0, dtype=torch.uint8))
    assert linear.supports(packed.format)
    assert torch.equal(linear.linear(packed.format)(x, packed), whole_product(x, packed))
