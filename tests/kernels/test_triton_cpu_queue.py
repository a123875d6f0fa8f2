"""The launches of a CPU queue against their plain twins, and whole steps.

Whole steps run with the native library.
"""

import pytest
import torch

from tests.executor.device_planned import check_device_planned, decode, device_planned_server, run_large_batch
from tests.executor.steps import random_step
from tests.kernels.sections import DEVICE, TOLERANCE, poisoned, relative_error
from tests.kernels.test_triton_server import CARD
from tests.small_model import make_experts, make_store
from tests.support import decode_steps
from tests.support.decode_steps import COSTS, decide, make_table, rows
from tests.support.faulty_store import FaultyStore
from vllm_dymoe.kernels import native
from vllm_dymoe.kernels.cpu_queue import Ask, QueueMemory, QueueShape, ask_plain, collect_plain, post_plain, take_plain
from vllm_dymoe.kernels.triton.cpu_queue import DeviceQueue, ask, collect, post, take_sources
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.rule import HIGH, LOW

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="make gpu rings with memory that both sides map"),
    pytest.mark.skipif(native.load() is None, reason="the native library was not built here"),
]


def make_queue(hidden):
    shape = QueueShape(3, 6, 3, 12, hidden, torch.bfloat16)
    memory = torch.zeros(shape.nbytes + 128, dtype=torch.uint8)
    return QueueMemory(shape, memory[-memory.data_ptr() % 128 :][: shape.nbytes])


@pytest.mark.parametrize(("nested", "hidden"), [(False, 72), (True, 70)])
def test_post_and_collect_are_their_plain_twins(nested, hidden):
    """Every byte of the ring is compared.

    A step that leaves nothing to the CPU posts nothing and does not wait.
    """
    queues = make_queue(hidden), make_queue(hidden)
    turns = [torch.tensor([0, 0, queue.address]) for queue in queues]
    table = make_table({LOW: [3, 3], HIGH: [3, 3]}, nested=nested, costs=COSTS["share"])
    posted = 0
    for seed in range(8):
        ids, weights = decode_steps.random_step(seed, 1 + seed % 5)
        real, x = max(1, len(ids) - 1), torch.randn(len(ids), hidden).bfloat16()
        plan = decide(table, seed % 2, ids, weights, real)
        scales = weights if seed % 3 else None  # where they multiply inputs
        post_plain(queues[0], turns[0], seed % 2, x[:real], ids[:real], plan, None if scales is None else scales[:real])
        device_queue = DeviceQueue(queues[1].shape, turns[1], torch.full((18,), 77, dtype=torch.int32))
        told = real if real < len(ids) else real + seed  # no more rows are tokens than there are
        post(device_queue, seed % 2, x, ids, rows(told), plan.tensors, scales)
        on_cpu = bool((plan.action == Action.CPU).any())
        posted += on_cpu
        assert queues[1].control.posted == posted
        assert turns[0][:2].tolist() == turns[1][:2].tolist() == [posted, posted * on_cpu]
        assert torch.equal(queues[0].memory, queues[1].memory)
        answers = torch.randn(6 * 3, hidden).bfloat16()
        for queue in queues:
            queue.entry(posted).out.copy_(answers)
            queue.control.answered = 2 * posted
        outs = [torch.zeros(ids.numel(), hidden, dtype=torch.bfloat16) for _ in queues]
        collect_plain(queues[0], turns[0], outs[0], plan.computed)
        collect(device_queue, outs[1], plan.computed, weights, poisoned(len(ids), hidden, dtype=torch.bfloat16))
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(device_queue.present[: ids.numel()] >= 0, plan.computed.flatten() > 0)
    assert posted > 3


@pytest.mark.parametrize("nested", [False, True])
def test_ask_and_take_are_their_plain_twins(nested):
    """Every byte of ring, table and plan is compared; some experts cannot be read."""
    queues = make_queue(72), make_queue(72)
    turns = [torch.tensor([0, 0, queue.address]) for queue in queues]
    tables = [make_table({LOW: [3, 3], HIGH: [3, 3]}, nested=nested, staging=2) for _ in queues]
    asked = 0
    for seed in range(10):
        layer, (ids, weights) = seed % 2, decode_steps.random_step(seed // 3, 1 + seed % 5)
        plans = [decide(table, layer, ids, weights) for table in tables]
        ask_plain(queues[0], turns[0], layer, plans[0])
        device_queue = DeviceQueue(queues[1].shape, turns[1], turns[1])
        ask(device_queue, layer, plans[1].tensors)
        assert torch.equal(queues[0].memory, queues[1].memory)
        assert turns[0][:2].tolist() == turns[1][:2].tolist()
        some = bool(turns[0][1])
        asked += some
        generator = torch.Generator().manual_seed(seed)
        answers = torch.randint(0, 4, (len(queues[0].entry(asked).calls), 2), generator=generator) << 20
        for queue in queues:
            if some:
                queue.entry(asked).calls[:, Ask.ADDRESS : Ask.ADDRESS + 2] = answers
            queue.control.answered = 2 * asked
        take_plain(queues[0], turns[0], tables[0], layer, plans[0])
        take_sources(device_queue, tables[1].at(layer), layer, plans[1].tensors)
        for one, other in ((plans[0].tensors, plans[1].tensors), tuple(map(vars, tables))):
            for name, values in one.items():
                assert name == "scratch" or torch.equal(values, other[name]), name
    assert asked > 5
    assert (tables[0].unread >= 0).all()


@pytest.mark.parametrize("nested", [False, True])
def test_steps_whose_experts_come_from_disk_have_the_bits_of_steps_from_memory(nested):
    store = make_store(make_experts(layers=2, nested=nested))
    steps = [(0, 0, 1), (1, 1, 2), (2, 0, 18), (3, 1, 1), (0, 0, 1)]
    outs = []
    for source in (store, FaultyStore(store)):
        server = device_planned_server(source, "50%", low=2, **CARD)
        outs.append([
            (decode if tokens <= 16 else run_large_batch)(server, layer, *random_step(seed, tokens, store.experts))
            for seed, layer, tokens in steps
        ])  # fmt: skip
        server.check_integrity()
        server.close(keep_store=True)
    assert all(map(torch.equal, *outs))
    assert source.reads


@pytest.mark.parametrize("nested", [False, True])
def test_a_step_with_a_cpu_queue_is_the_step_without_one(nested):
    """Rows from the CPU differ in the last bits; all others are the same.

    The CPU has another kernel.
    """
    store = make_store(make_experts(layers=2, nested=nested))
    want, outs = [], []
    with_all = device_planned_server(store, "100%", **CARD)
    shared = device_planned_server(store, "minimum", misses="compute", **CARD)
    for seed, layer, tokens in ((0, 0, 1), (1, 1, 2), (2, 0, 3), (3, 1, 1)):
        step = random_step(seed, tokens, store.experts)
        want.append(decode(with_all, layer, *step))
        outs.append(decode(shared, layer, *step))
        check_device_planned(shared)
    assert all(relative_error(out, some.double()) < TOLERANCE[out.dtype] for out, some in zip(outs, want, strict=True))
    assert shared.stats().cpu_executed > 1
    shared.close(keep_store=True)
