"""A layer's step in Triton: described once, and computed as its experts arrive."""

import itertools
from itertools import accumulate

import pytest
import torch

from benchmarks.gpu.experts import ExpertWork, compute_experts, section_of
from tests.kernels.matrices import random_expert
from tests.kernels.sections import DEVICE
from tests.kernels.test_triton_kernel import make_kernel, on_device, random_x
from vllm_dymoe.experts.format import PackedExpert
from vllm_dymoe.kernels import Activation
from vllm_dymoe.kernels.triton import kernel as module
from vllm_dymoe.planner.plan import Grouped, LayerPlan

COUNTS = (1, 3, 20, 70, 2, 5, 16, 130)
BITS = (4, 2, 16, 4, 8, 2, 4, 2)
WAYS = [
    [[0, 1, 2, 3, 4, 5, 6, 7]],
    [[7], [6], [5], [4], [3], [2], [1], [0]],
    [[1, 6], [4, 0, 7, 2], [3, 5]],  # beside experts that were computed before, whose slots now hold others
]


def described_layer():
    """Return x, experts of every class and bit-width, and each one's (token, k)."""
    hidden, top_k = 64, len(COUNTS)
    experts = [random_expert(hidden, 40, bits, seed=i) for i, bits in enumerate(BITS)]
    x = random_x(max(COUNTS), hidden)
    rows = [torch.arange(count) for count in COUNTS]
    pairs = [top_k * row + expert for expert, row in enumerate(rows)]
    packed = [tuple(on_device(matrix) for matrix in (e.gate, e.up, e.down)) for e in experts]
    return x, packed, rows, pairs


def plan_of(rows, pairs, order=None):
    grouped = Grouped(list(range(len(rows))), [0, *accumulate(map(len, rows))], torch.cat(rows), torch.cat(pairs))
    return LayerPlan.of_experts(grouped).select(grouped.experts if order is None else order)


@pytest.mark.parametrize(
    ("order", "limits"), [(range(8), None), ([6, 7, 0, 1, 2, 5, 3, 4], (5, 130)), ([6, 7, 0, 1, 2, 5, 3, 4], (2, 64))]
)
def test_however_experts_are_grouped_into_launches_their_bits_are_those_of_one_call(monkeypatch, order, limits):
    """The workspace may have fewer positions than the layer or one expert needs."""
    x, packed, rows, pairs = described_layer()
    kernel = make_kernel()
    nan = torch.full((len(COUNTS) * max(COUNTS), x.shape[1]), float("nan"), dtype=x.dtype, device=DEVICE)
    want = nan.clone()
    work = [ExpertWork(*three, r.to(DEVICE), p.to(DEVICE)) for three, r, p in zip(packed, rows, pairs, strict=True)]
    compute_experts(kernel, x, work, want, Activation.SILU)
    if limits is not None:
        monkeypatch.setattr(kernel, "_limits", lambda shape, tiles: limits)
    for way in WAYS:
        out, kept = nan.clone(), []
        plan = plan_of(rows, pairs, list(order))
        item = list(order).index
        kernel.begin(x, plan, out, Activation.SILU)
        for experts in way:
            slots = {expert: [section_of(matrix).clone() for matrix in packed[expert]] for expert in experts}
            for expert, sections in slots.items():
                views = (m.format.view(section) for m, section in zip(packed[expert], sections, strict=True))
                plan.place(item(expert), PackedExpert(*views))
            kernel.compute([item(expert) for expert in experts])
            for section in itertools.chain(*slots.values()):
                section.fill_(0xFF)  # NaN: from now on the slot holds another expert
            kept += slots.values()
        assert torch.equal(out.view(torch.int16), want.view(torch.int16)), way
    assert not kernel._semaphores.any()


def test_projections_of_a_described_layer_are_received_before_they_are_launched(monkeypatch):
    """The device gets the address of an expert before anybody waits for the expert."""
    x, packed, rows, pairs = described_layer()
    kernel, events = make_kernel(), []
    kernel.launch = lambda *arguments, start=None: start or arguments[-1](2)
    out = torch.empty(len(COUNTS) * max(COUNTS), x.shape[1], dtype=x.dtype, device=DEVICE)
    plan = plan_of(rows, pairs, [0, 1])
    kernel.begin(x, plan, out, Activation.SILU)
    plan.place(0, PackedExpert(*packed[0]))
    kernel.compute([0], lambda count: None)
    placed = module.place_experts

    def noted(*places, **compiled):
        events.extend([] if compiled else ["place"])
        placed(*places, **compiled)

    monkeypatch.setattr(module, "place_experts", noted)
    plan.place(1, PackedExpert(*packed[1]))
    kernel.compute([1], lambda count: events.append("receive"))
    assert events == ["place", "receive"]


def test_a_misaligned_place_is_refused():
    x, packed, rows, pairs = described_layer()
    gate, up, down = packed[0]
    section = torch.zeros(gate.format.nbytes + 8, dtype=torch.uint8, device=DEVICE)[8:]
    stored = section[: gate.format.weight_bytes].view(gate.format.weight_shape)
    out = torch.empty(8, x.shape[1], dtype=x.dtype, device=DEVICE)
    kernel, plan = make_kernel(), plan_of(rows[:1], pairs[:1])
    kernel.begin(x, plan, out, Activation.SILU)
    plan.place(0, PackedExpert(type(gate)(gate.format, stored, gate.scales_zeros), up, down))
    with pytest.raises(ValueError, match="multiples of 16"):
        kernel.compute([0])
    wide = random_expert(96, 40, 4)
    kernel.begin(x, plan := plan_of(rows[:1], pairs[:1]), out, Activation.SILU)
    plan.place(0, PackedExpert(wide.gate, wide.up, wide.down))
    with pytest.raises(ValueError, match="work holds gate 40 x 96"):
        kernel.compute([0])
