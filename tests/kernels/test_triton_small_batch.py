"""A whole decode step takes three launches and never asks the host.

test_triton_server.py compares its bits.
"""

import pytest
import torch

from tests.support.no_host import HostInStepError, NoHost
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import DecodeTile, ExpertShape
from vllm_dymoe.kernels.triton.small_batch_step import SmallBatchStep
from vllm_dymoe.kernels.triton.tiles import Tiles
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.table import Table

EXPERTS, TOP_K = 6, 2


def traced(planted=lambda ids: None, **told):
    launches = []

    def start(kernel, grid, tensors, constants, options):
        assert all(isinstance(value, int) or value.device.type == "meta" for value in tensors)
        launches.append((kernel.__name__, grid))

    with NoHost():
        shape = ExpertShape(256, 128, 32, torch.bfloat16)
        tile = DecodeTile(4, 2)
        empty = lambda *size, dtype=torch.float32: torch.empty(size, dtype=dtype, device="meta")  # noqa: E731
        step = SmallBatchStep(
            shape, frozenset((4,)), Tiles(4, tile, tile, (), ()), Activation.SILU,
            empty(1 << 20, dtype=torch.uint8), empty(1 << 12, dtype=torch.int32),
        )  # fmt: skip
        table = {name: empty(*size, dtype=dtype) for name, (size, dtype) in sizes(Table).items()}
        plan = {name: empty(*size, dtype=dtype) for name, (size, dtype) in sizes(LayerPlan).items()}
        ids = empty(4, TOP_K, dtype=torch.int64)
        planted(ids)
        x = empty(4, 256, dtype=torch.bfloat16)
        count = empty(1, dtype=torch.int32)
        step.run(table, 0, x, ids, empty(4, TOP_K), count, plan, torch.empty_like(x), **told, start=start)
    return launches


def sizes(kind):
    made = (
        LayerPlan.allocate(4, TOP_K, EXPERTS, "cpu")
        if kind is LayerPlan
        else Table.allocate(3, EXPERTS, rows=4, top_k=TOP_K, depth=1, device="cpu")
    )
    return {
        name: (values.shape, values.dtype) for name, values in vars(made).items() if isinstance(values, torch.Tensor)
    }


@pytest.mark.parametrize("weights_on_input", [False, True])
def test_a_step_is_three_launches_without_a_host(weights_on_input):
    """Grids depend only on the shape.

    4 tokens and 6 experts give at most 6 items, and one that asks for zeros.
    """
    launches = traced(weights_on_input=weights_on_input)
    assert launches == [("decide_kernel", (1,)), ("gate_up_kernel", (2, 6, 2)), ("down_kernel", (4, 7, 2))]


def test_a_planted_look_at_the_device_is_found():
    """tests/support/test_support.py covers all kinds of such operations."""
    with pytest.raises(HostInStepError, match="waits for the device"):
        traced(lambda ids: ids.max().item())
