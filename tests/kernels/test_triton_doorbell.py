"""The launches of a doorbell against their plain twins, and a whole step with the native library behind it."""

import pytest
import torch

from tests.kernels.sections import DEVICE, TOLERANCE, poisoned, relative_error
from tests.kernels.test_triton_runtime import triton_kernel
from tests.runtime.decided import check_decided, decided_runtime, decode
from tests.runtime.steps import random_step
from tests.small_model import make_experts, make_store
from tests.support import decode_steps
from tests.support.decode_steps import COSTS, decide, make_table, rows
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.doorbell import Ring, RingShape, collect_plain, post_plain
from vllm_dymoe.kernels.triton.doorbell import Door, collect, post
from vllm_dymoe.residency.constants import Fate
from vllm_dymoe.residency.rule import HIGH, LOW
from vllm_dymoe.runtime import moe

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="make gpu rings with memory that both sides map"),
    pytest.mark.skipif(native.load() is None, reason="the native library was not built here"),
]


def make_ring(hidden):
    shape = RingShape(3, 6, 3, 12, hidden, torch.bfloat16)
    memory = torch.zeros(shape.nbytes + 128, dtype=torch.uint8)
    return Ring(shape, memory[-memory.data_ptr() % 128 :][: shape.nbytes])


@pytest.mark.parametrize(("nested", "hidden"), [(False, 72), (True, 70)])
def test_post_and_collect_are_their_plain_twins(nested, hidden):
    """Every byte of the ring; a step that leaves nothing posts nothing and does not wait."""
    rings = make_ring(hidden), make_ring(hidden)
    turns = [torch.tensor([0, 0, ring.address]) for ring in rings]
    table = make_table({LOW: [3, 3], HIGH: [3, 3]}, nested=nested, costs=COSTS["share"])
    posted = 0
    for seed in range(8):
        ids, weights = decode_steps.random_step(seed, 1 + seed % 5)
        real, x = max(1, len(ids) - 1), torch.randn(len(ids), hidden).bfloat16()
        decision = decide(table, seed % 2, ids, weights, real)
        post_plain(rings[0], turns[0], seed % 2, x[:real], ids[:real], decision)
        door = Door(rings[1].shape, turns[1], torch.full((18,), 77, dtype=torch.int32))
        post(door, seed % 2, x, ids, rows(real), decision.tensors)
        there = bool((decision.fate == Fate.THERE).any())
        posted += there
        assert rings[1].bell.posted == posted
        assert turns[0][:2].tolist() == turns[1][:2].tolist() == [posted, posted * there]
        assert torch.equal(rings[0].memory, rings[1].memory)
        answers = torch.randn(6 * 3, hidden).bfloat16()
        for ring in rings:
            ring.entry(posted).out.copy_(answers)
            ring.bell.answered = 2 * posted
        outs = [torch.zeros(ids.numel(), hidden, dtype=torch.bfloat16) for _ in rings]
        collect_plain(rings[0], turns[0], outs[0], decision.computed)
        collect(door, outs[1], decision.computed, weights, poisoned(len(ids), hidden, dtype=torch.bfloat16))
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(door.present[: ids.numel()] >= 0, decision.computed.flatten() > 0)
    assert posted > 3


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_with_a_doorbell_is_the_step_without_one(nested, monkeypatch):
    """Up to the last bits of another kernel; what is not left to the host keeps its bits."""
    monkeypatch.setattr(moe, "make_kernel", triton_kernel)
    store = make_store(make_experts(layers=2, nested=nested))
    want, outs = [], []
    with_all, shared = decided_runtime(store, "100%"), decided_runtime(store, "minimum", misses="compute")
    for seed, layer, tokens in ((0, 0, 1), (1, 1, 2), (2, 0, 3), (3, 1, 1)):
        step = random_step(seed, tokens, store.experts)
        want.append(decode(with_all, layer, *step))
        outs.append(decode(shared, layer, *step))
        check_decided(shared)
    assert all(relative_error(out, some.double()) < TOLERANCE[out.dtype] for out, some in zip(outs, want, strict=True))
    assert shared.stats().there > 1
    shared.close(keep_store=True)
