"""The handshake of a CPU queue: all interleavings of a model, and two processes.

tests/executor/test_device_planned_schedules.py checks the order of accesses to the real memory.
"""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass, replace

import pytest
import torch

from tests.small_model import make_experts, make_store
from vllm_dymoe.cache.device_cache import view_in_store
from vllm_dymoe.executor import cpu_worker
from vllm_dymoe.executor.cpu_worker import CpuQueue
from vllm_dymoe.experts.format import SliceKey
from vllm_dymoe.kernels import Activation, CpuKernel, native
from vllm_dymoe.kernels.cpu_queue import QueueMemory, QueueShape, collect_plain, post_plain
from vllm_dymoe.planner.constants import Action
from vllm_dymoe.planner.large_batch import MOST_PARTS
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.routing import group_by_expert

# -- the model ------------------------------------------------------------------------------------

POSTS = 3


@dataclass(frozen=True)
class State:
    """The state of device, poller, watchdog and memory.

    An entry records whose x and whose rows it contains.
    """

    entries: tuple = ((0, 0), (0, 0), (0, 0), (0, 0))
    posted: int = 0
    answered: int = 0
    device: tuple = ("fill", 1)
    poller: tuple = ("look", 0, 0)  # its action, the number of the request, and the value of `answered` that it saw
    given_up: frozenset = frozenset()
    read: tuple = ()  # (number, whose rows the device took)
    alive: bool = True


class Handshake:
    """The possible next actions of each side. Subclasses plant faults."""

    depth = 4
    kills = True

    def entry(self, state, number, x=None, rows=None):
        at, entries = number % self.depth, list(state.entries)
        entries[at] = (entries[at][0] if x is None else x, entries[at][1] if rows is None else rows)
        return replace(state, entries=tuple(entries))

    def device(self, state):
        what, number = state.device
        if what == "fill":
            yield replace(self.entry(state, number, x=number), device=("post", number))
        elif what == "post":
            yield replace(state, posted=number, device=("wait", number))
        elif what == "wait" and state.answered >= 2 * number:
            taken = (number, state.entries[number % self.depth][1])
            following = ("fill", number + 1) if number < POSTS else ("end", 0)
            yield replace(state, read=(*state.read, taken), device=following)

    def poller(self, state):
        what, number, seen = state.poller
        if not state.alive:
            return
        if what == "look" and state.posted >= state.answered // 2 + 1:
            yield replace(state, poller=("compute", state.answered // 2 + 1, state.answered))
        elif what == "compute":
            x = state.entries[number % self.depth][0]
            yield replace(self.entry(state, number, rows=x), poller=("answer", number, seen))
        elif what == "answer":
            yield replace(self.answer(state, number, seen), poller=("look", 0, 0))

    def answer(self, state, number, seen):
        return replace(state, answered=2 * number) if state.answered == seen else state

    def watchdog(self, state):
        number = state.answered // 2 + 1
        if state.posted >= number:  # at any time, because a timeout orders nothing
            yield replace(state, answered=2 * number + 1, given_up=state.given_up | {number})

    def steps(self, state):
        yield from self.device(state)
        yield from self.poller(state)
        yield from self.watchdog(state)
        if self.kills and state.alive:
            yield replace(state, alive=False)


def explore(handshake):
    """Visit every reachable state.

    Returns the error of the first bad state, or None, and the number of states.
    """
    seen, left = {State()}, [State()]
    while left:
        state = left.pop()
        for number, rows in state.read:
            if number not in state.given_up and rows != number:
                return f"the device takes the rows of {rows} for those of {number}", len(seen)
        following, number = list(handshake.steps(state)), state.device[1]
        reads = state.poller[0] == "compute" and state.alive
        if state.device[0] == "post" and reads and number % handshake.depth == state.poller[1] % handshake.depth:
            return f"the device fills an entry that the poller reads: {state}", len(seen)
        if not following and state.device[0] != "end":
            return f"the device waits for ever: {state}", len(seen)
        for one in following:
            if one.answered < state.answered:
                return f"an answer comes back: {state}", len(seen)
            if one not in seen:
                seen.add(one)
                left.append(one)
    return None, len(seen)


class StoredAnswer(Handshake):
    """An answer is stored, not compared and exchanged, so a late one counts."""

    def answer(self, state, number, seen):
        return replace(state, answered=2 * number)


class OneAnswer(Handshake):
    """An answer is a flag without a number, as if the device waited for a constant."""

    def device(self, state):
        if state.device[0] == "wait" and state.answered > 2 * (state.device[1] - 1) + 1:
            state = replace(state, answered=max(state.answered, 2 * state.device[1]))
        yield from super().device(state)

    def answer(self, state, number, seen):
        return replace(state, answered=state.answered + 2 - state.answered % 2)


class OneEntry(Handshake):
    """All requests share an entry.

    Rows of an abandoned request overwrite those of another one.
    """

    depth = 1


class NoWatchdog(Handshake):
    """The poller is killed, and the device waits forever."""

    def watchdog(self, state):
        return iter(())


def test_no_interleaving_gives_a_step_another_ones_rows_or_waits_for_ever():
    wrong, states = explore(Handshake())
    assert wrong is None
    assert states > 200


@pytest.mark.parametrize("fault", [StoredAnswer, OneAnswer, OneEntry, NoWatchdog])
def test_a_planted_fault_is_found(fault):
    wrong, _ = explore(fault())
    assert wrong is not None
    assert ("for ever" in wrong) == (fault is NoWatchdog)


# -- two processes --------------------------------------------------------------------------------

needs_library = pytest.mark.skipif(native.load() is None, reason="the native library was not built here")
STEPS = int(os.environ.get("CPU_QUEUE_STEPS", "3000"))
"""By hand: CPU_QUEUE_STEPS=1000000 pytest tests/kernels/test_cpu_queue.py; 100,000 took 78 s on two busy cores."""
TOKENS = 2


class SharedQueue(CpuQueue):
    """A CPU queue in memory that another process maps, too."""

    def __init__(self, experts, memory, timeout=20.0, on_failure=print):
        super().__init__(experts, TOKENS, 1, timeout, 16, torch.device("cpu"), on_failure=on_failure)
        self.queue = QueueMemory(self.queue.shape, memory)
        self.turn[2] = self.queue.address


def shape_of(experts):
    fmt = experts.formats[4]
    return QueueShape(
        2 * MOST_PARTS * len(experts.layers) + 2, TOKENS, experts.top_k, experts.num_experts, fmt.hidden, fmt.dtype
    )


def answer(queue, slices):
    """Run the poller, in a process of its own.

    It was forked after the experts were mapped, so they have the same addresses.
    """
    torch.set_num_threads(1)
    cpu_queue = SharedQueue(slices.experts, queue)
    cpu_queue._activation = Activation.SILU
    cpu_queue._answer()


def forked(queue, store):
    process = multiprocessing.get_context("fork").Process(target=answer, args=(queue, store), daemon=True)
    process.start()
    return process


def shared_queue(experts):
    memory = torch.zeros(shape_of(experts).nbytes + 128, dtype=torch.uint8).share_memory_()
    return memory[-memory.data_ptr() % 128 :][: shape_of(experts).nbytes]


def plan_of(store, layer, ids):
    """Return a plan that leaves every expert of the step to the CPU."""
    experts, chosen = store.experts, sorted({int(expert) for expert in ids.flatten()})
    plan = LayerPlan.allocate(len(ids), experts.top_k, experts.num_experts, "cpu")
    plan.count.fill_(len(chosen))
    fmt = experts.formats[4]
    for item, expert in enumerate(chosen):
        plan.experts[item], plan.bits[item], plan.action[0, item] = expert, fmt.encoding.tag, Action.CPU
        first = store.packed(SliceKey(layer, expert, 4)).data_ptr()
        plan.addresses[0, item] = torch.tensor([first + section.start for section in fmt.sections])
    plan.computed.fill_(2)
    return plan


def computed_here(store, layer, x, ids):
    """Compute the rows of all pairs in this process."""
    kernel, out = CpuKernel(threads=1), torch.empty(ids.numel(), x.shape[1], dtype=x.dtype)
    grouped = group_by_expert(ids.numpy())
    plan = LayerPlan.of_experts(grouped, [view_in_store(store, layer, expert, (4,)) for expert in grouped.experts])
    kernel.begin(x, plan, out, Activation.SILU)
    kernel.compute(range(len(grouped.experts)))
    return out


def random_posts(experts, count=40):
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        ids = torch.stack(
            [torch.randperm(experts.num_experts, generator=generator)[: experts.top_k] for _ in range(TOKENS)]
        )
        x = torch.randn(TOKENS, experts.formats[4].hidden, generator=generator).bfloat16()
        yield number % len(experts.layers), x, ids


@needs_library
def test_another_process_answers_with_the_same_bits_and_a_kill_ends_no_wait():
    """Every wait ends, even after the poller is killed halfway.

    Real kernels run over shared memory.
    """
    torch.set_num_threads(1)
    store = make_store(make_experts(layers=2))
    queue, experts = shared_queue(store.experts), store.experts
    process = forked(queue, store)
    said = []
    cpu_queue = SharedQueue(experts, queue, timeout=0.5, on_failure=said.append)
    posts = [
        (layer, x, ids, plan_of(store, layer, ids), computed_here(store, layer, x, ids))
        for layer, x, ids in random_posts(experts)
    ]
    out = torch.empty(TOKENS * experts.top_k, experts.formats[4].hidden, dtype=torch.bfloat16)
    for number in range(STEPS):
        layer, x, ids, plan, want = posts[number % len(posts)]
        post_plain(cpu_queue.queue, cpu_queue.turn, layer, x, ids, plan)
        assert collect_plain(cpu_queue.queue, cpu_queue.turn, out, plan.computed)
        assert torch.equal(out, want)
    watchdog = threading.Thread(target=cpu_queue._watch, daemon=True)
    watchdog.start()
    killer = threading.Timer(0.05, os.kill, (process.pid, signal.SIGKILL))
    killer.start()
    answers, begun = [], time.monotonic()
    while not answers or answers[-1]:
        layer, x, ids, plan, want = posts[len(answers) % len(posts)]
        post_plain(cpu_queue.queue, cpu_queue.turn, layer, x, ids, plan)
        answers.append(collect_plain(cpu_queue.queue, cpu_queue.turn, out, plan.computed))
        assert not answers[-1] or torch.equal(out, want)
    assert cpu_queue.failed
    assert len(said) == 1
    for _ in range(20):  # the remaining layers of the step
        post_plain(cpu_queue.queue, cpu_queue.turn, layer, x, ids, plan)
        assert not collect_plain(cpu_queue.queue, cpu_queue.turn, out, plan.computed)
    assert time.monotonic() - begun < 20
    process.join()
    cpu_queue._closing.set()
    watchdog.join()


@needs_library
@pytest.mark.parametrize("spins", [True, False])
def test_threads_that_spin_and_threads_that_sleep_give_the_same_bits(spins, monkeypatch):
    """Three threads, perhaps more than cores, have time to sleep between some posts."""
    monkeypatch.setattr(cpu_worker, "_SPIN_NS", 2_000_000)
    store = make_store(make_experts(layers=2, hidden=256, intermediate=192))
    experts = store.experts
    cpu_queue = CpuQueue(experts, TOKENS, 3, 20.0, 16, torch.device("cpu"), on_failure=print, spins=spins)
    cpu_queue.serve(Activation.SILU)
    out = torch.empty(TOKENS * experts.top_k, experts.formats[4].hidden, dtype=torch.bfloat16)
    for number, (layer, x, ids) in enumerate(random_posts(experts, 60)):
        if number % 20 == 10:
            time.sleep(0.02)
        plan = plan_of(store, layer, ids)
        post_plain(cpu_queue.queue, cpu_queue.turn, layer, x, ids, plan)
        assert collect_plain(cpu_queue.queue, cpu_queue.turn, out, plan.computed)
        assert torch.equal(out, computed_here(store, layer, x, ids))
    cpu_queue.close()


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(2, 1, 1), (7, 1, 6), (8, 1, 6), (16, 1, 14), (16, 4, 3)])
def test_threads_spin_where_a_rank_has_enough_cores_and_leave_one_more_free(cores, ranks, threads, monkeypatch):
    monkeypatch.setattr(cpu_worker, "usable_cores", lambda: cores)
    assert cpu_worker.spins("cuda", ranks) == (cores // ranks >= 8)
    assert cpu_worker.cpu_worker_threads("cuda", ranks) == threads
    assert not cpu_worker.spins("cpu", ranks)
