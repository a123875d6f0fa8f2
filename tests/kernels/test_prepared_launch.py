"""A repeated launch: what the driver receives from the second time on."""

import pytest
import torch

from vllm_dymoe.kernels.triton import start
from vllm_dymoe.kernels.triton.start import PreparedLaunch

GRID, CONSTANTS, OPTIONS = (3, 2), {"SIZE": 64, "KIND": "a"}, {"num_warps": 4}


class Compiled:
    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.launched = []

    def run(self, *arguments):
        self.launched.append(arguments)


class Kernel:
    """A kernel that records usual launches, each of which returns ``found``."""

    def __init__(self, found, arg_names=("x", "out", "list", "count", "KIND", "SIZE")):
        self.found, self.arg_names, self.usual = found, arg_names, []

    def run(self, *tensors, grid, warmup, **constants):
        assert (grid, warmup) == (GRID, False)
        assert constants == CONSTANTS | OPTIONS | {"enable_fp_fusion": True}
        self.usual.append(tensors)
        return self.found


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    monkeypatch.setattr(start, "_current_stream", lambda: 77)


def tensors(dtype=torch.bfloat16, first=0):
    return [torch.zeros(64, dtype=dtype)[first:] for _ in range(2)]


def test_the_second_launch_gets_addresses_and_constants_in_the_kernels_order():
    kernel, work = Kernel(Compiled()), torch.zeros(8, dtype=torch.int32)
    launch = PreparedLaunch(kernel, GRID, (work, 5), CONSTANTS, OPTIONS)
    first, second = tensors(), tensors()
    launch(*first)
    assert [*map(id, kernel.usual[0])] == [*map(id, (*first, work, 5))]
    launch(*second)
    assert len(kernel.usual) == 1
    addresses = [tensor.data_ptr() for tensor in (*second, work)]
    assert kernel.found.launched == [(3, 2, 1, 77, "function", "metadata", None, None, None, *addresses, 5, "a", 64)]


@pytest.mark.parametrize("other", [{"first": 1}, {"dtype": torch.float16}])
def test_what_the_kernel_was_not_compiled_for_goes_the_usual_way(other):
    kernel = Kernel(Compiled())
    launch = PreparedLaunch(kernel, GRID, (torch.zeros(8), 5), CONSTANTS, OPTIONS)
    for given in (tensors(), tensors(**other), tensors()):
        launch(*given)
    assert (len(kernel.usual), len(kernel.found.launched)) == (2, 1)


@pytest.mark.parametrize(
    ("found", "names"), [(None, ("x", "out", "KIND", "SIZE")), (Compiled(), ("x", "out", "DEFAULT"))]
)
def test_without_a_compiled_kernel_or_all_constants_every_launch_is_usual(found, names):
    kernel = Kernel(found, names)
    launch = PreparedLaunch(kernel, GRID, (), CONSTANTS, OPTIONS)
    for _ in range(3):
        launch(*tensors())
    assert len(kernel.usual) == 3
