"""Misses that the CPU computes for an emulated card.

The bits are the same at every budget and share.
"""

import itertools
import json
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.executor.device_planned import (
    check_device_planned,
    decode,
    device_planned_server,
    rates_of,
    run_device_planned,
    run_large_batch,
)
from tests.executor.steps import BUDGETS, CPU, STEPS, forward, make_server, random_step
from tests.small_model import make_experts, make_store
from vllm_dymoe.cache.device_cache import view_in_store
from vllm_dymoe.executor import cpu_execution
from vllm_dymoe.executor import rates as rates_module
from vllm_dymoe.executor.cpu_worker import WATCHDOG_S
from vllm_dymoe.kernels import Activation, CpuKernel, combine, native
from vllm_dymoe.planner.constants import LOW_VERSION, SMALL_BATCH_ROWS, Action, Cost
from vllm_dymoe.planner.large_batch import small_batch_parts
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.routing import group_by_expert
from vllm_dymoe.planner.table import Counter
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.server import Parts, expert_server

MIXED = Dymoe(retention=0.5, high_by="depth", reuse_high=False)

needs_library = pytest.mark.skipif(native.load() is None, reason="the native library was not built here")


@needs_library
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("misses", "ratio"), [("compute", 0), ("share", 3)])
def test_no_share_changes_a_bit_where_the_device_decides(nested, misses, ratio):
    """One thread answers the CPU queue while this one computes hits.

    Large-batch steps fetch.
    """
    store, policy = make_store(make_experts(layers=2, nested=nested)), MIXED
    want = run_device_planned(device_planned_server(store, "100%", policy), STEPS)
    for budget in BUDGETS[1:]:
        with rates_of(ratio):
            server = device_planned_server(store, budget, policy, misses=misses)
        got = run_device_planned(server, STEPS)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), budget
        stats = server.stats()
        assert stats.hits + stats.misses == stats.planned["high"] + stats.planned["low"]
        assert stats.cpu_executed > 0
        check_device_planned(server)
        assert int(server.cpu_execution.worker.queue.control.answered) > 0
        server.close(keep_store=True)


@needs_library
@pytest.mark.parametrize(("misses", "ratio"), [("compute", 0), ("share", 8)])
def test_large_batches_whose_misses_the_cpu_executes_run_as_small_ones_in_turn(misses, ratio):
    """The CPU is used for 17 and 19 tokens, but not for 33 or if all are resident.

    Rows after the tokens belong to no expert.
    """
    store = make_store(make_experts(layers=2, num_experts=24))
    steps = [(seed, seed % 2, rows, tokens) for seed, (rows, tokens) in enumerate([(17, 17), (32, 19), (33, 33)])]
    host, asked = device_planned_server(store, "100%", "exact", low=0), []
    for budget in ("minimum", "25%", "100%"):
        with rates_of(ratio):
            server = device_planned_server(store, budget, "exact", low=0, misses=misses)
        for seed, layer, rows, tokens in steps:
            given = random_step(seed, rows, store.experts)
            before = server.stats().cpu_executed
            out = run_large_batch(server, layer, *given, rows=tokens)
            assert torch.equal(out, run_large_batch(host, layer, *given, rows=tokens)), (budget, rows)
            asked.append(server.stats().cpu_executed > before)
            check_device_planned(server)
        server.close(keep_store=True)
    assert asked == [True, True, False] * 2 + [False] * 3


def test_small_batches_replace_a_large_one_where_the_estimate_says_so():
    """Qwen3-30B-A3B uses a CPU that executes at three times the link's rate.

    It does not where hardly any expert misses, or where the CPU is too slow.
    """
    costs = np.array([[20, 0, 0, 0], [0] * 4, [1000, 333, 67, 16]])

    def parts(tokens, missing=0.75, costs=costs, experts=128):
        return small_batch_parts(tokens, SMALL_BATCH_ROWS, 8, experts, missing, costs)

    assert [parts(tokens) for tokens in (17, 32, 33)] == [2, 2, 0]
    assert parts(32, missing=0) == 0
    assert parts(32, costs=0 * costs) == 0
    slow = costs * [[1], [1], [1]] + [[0] * 4, [0] * 4, [0, 3000, 0, 0]]
    assert parts(32, costs=slow) == 0, "the link brings everything twice"


@needs_library
def test_an_answer_that_does_not_come_fails_its_step_and_everything_is_fetched_from_then_on():
    store = make_store(make_experts(layers=2))
    want = run_device_planned(device_planned_server(store, "100%", "exact", low=0), STEPS)
    said = []
    with mock.patch.object(native.Library, "answer", return_value=None):  # without the poller
        options = {"low": 0, "misses": "compute", "transfer_timeout_s": 0.5}
        server = device_planned_server(store, "25%", "exact", on_late=said.append, **options)
        got = []
        for step in STEPS:
            server.small_batches.settle()  # as at the beginning of a step
            got += run_device_planned(server, [step])
    assert "has not computed" in said[0]
    assert "within 0.5 seconds" in said[0]
    assert server.small_batches.costs is None
    wrong = [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not torch.equal(a, b)]
    assert len(wrong) <= 1, "steps behind the one that failed are whole again"
    assert server.cpu_execution.worker.failed
    server.close(keep_store=True)


@needs_library
@pytest.mark.parametrize(("asked", "waits"), [(60, WATCHDOG_S), (0, WATCHDOG_S), (0.5, 0.5)])
def test_a_card_with_a_display_watchdog_waits_for_less(memory_store, asked, waits):
    """Otherwise the watchdog would end the waiting kernel, and the server with it."""
    parts = Parts(CPU)
    parts.device_memory.ends_long_kernels = lambda: True
    options = {"misses": "compute", "transfer_timeout_s": asked}
    server = device_planned_server(memory_store, "50%", low=0, parts=parts, **options)
    assert server.cpu_execution.worker._timeout == waits
    server.close(keep_store=True)


@needs_library
def test_the_first_starts_measure_rates_and_the_best_is_kept(memory_store, tmp_path):
    """Rates are measured while both link and CPU work.

    Invalid or unreadable ones are measured again.
    """
    kept = tmp_path / "rates.json"

    def rates(link_gbps=0.001):
        server = device_planned_server(memory_store, "50%", misses="share", link_gbps=link_gbps, rates=kept)
        found, costs = server.cpu_execution.rates, server.cache.table.cpu_costs
        assert costs[2, Cost.LINK] == round(1e9 * memory_store.experts.formats[4].nbytes / found.link)
        server.close(keep_store=True)
        return found

    first = rates()
    assert first.link == pytest.approx(1e6, rel=0.5)
    assert first.describe(memory_store.experts).startswith("0.0 GB/s of the link and ")
    measured = [replace(first, first_row={tag: s / n for tag, s in first.first_row.items()}) for n in (8, 2)]
    with mock.patch.object(cpu_execution, "measure", side_effect=measured) as measure:
        assert rates() == replace(measured[0], measured=2)
        assert rates() == replace(measured[0], measured=3), "the best of three"
        assert rates() == replace(measured[0], measured=3)
        assert measure.call_count == 2
    with mock.patch.object(rates_module, "machine", return_value="another one"):
        assert rates().measured == 1, "what travels with the folder does not count"
    assert rates() == replace(measured[0], measured=3)
    assert rates(link_gbps=0.002).measured == 1, "of another link"
    kept.write_text(json.dumps({"link": 3}))
    assert rates().measured == 1


@needs_library
@pytest.mark.parametrize(("misses", "ratio"), [("compute", 0), ("share", 8)])
def test_the_host_computes_experts_of_few_rows_while_the_link_brings_the_others(memory_store, misses, ratio):
    """Half of the pairs fall on two experts with more than `misses_rows` rows each.

    Nothing is resident.
    """
    experts, tokens, most = memory_store.experts, 9, 2
    with rates_of(ratio):
        server = device_planned_server(memory_store, "minimum", low=0, misses=misses, misses_rows=most)
    x, weights, _ = random_step(tokens, tokens, experts)
    hot, rest = torch.arange(tokens) % 2, 2 + torch.arange(tokens) % (experts.num_experts - 2)
    ids = torch.stack([hot, rest], 1).int()
    rows = torch.bincount(ids.flatten())
    assert 0 < int((rows > most).sum()) < int((rows > 0).sum())
    decode(server, 0, *random_step(1, 16, experts))  # uses up the free slots
    server.reset_stats()
    server.cache.read_device()
    held = server.cache.table.precision[0] > 0
    out = decode(server, 0, x, weights, ids)
    stats, far = server.stats(), torch.tensor(~held) & (rows > 0)
    few = int((far & (rows <= most)).sum())
    assert stats.cpu_executed == few if misses == "compute" else 0 < stats.cpu_executed <= few
    assert stats.transfers["demand"] == int(far.sum()) - stats.cpu_executed > 0
    assert torch.equal(out, forward(make_server(memory_store, "100%", low=0), 0, x, weights, ids))
    server.close(keep_store=True)


OF_STEPS = (1, 1, 7, 40) * 4


def steps_of_both_layers(experts):
    """Yield steps, some of which include an expert of another rank."""
    for number, tokens in enumerate(OF_STEPS):
        step = [random_step(2 * number + layer, tokens, experts) for layer in range(2)]
        for _, _, ids in step[number % 3 :]:
            ids[0, 0] = -1
        yield step


def repeated(store, layer, x, weights, ids, actions):
    """Return the answer that recorded actions describe, computed without a server.

    It has the server's bits, while float64 would only be near.
    """
    skipped, experts = actions % LOW_VERSION == Action.SKIP, store.experts
    own = torch.where(skipped, -1, ids)
    grouped, views = group_by_expert(own.numpy()), []
    for expert in grouped.experts:
        (version,) = set((actions[own == expert] >= LOW_VERSION).tolist())
        bits = min(experts.formats) if version else max(experts.formats)
        nested = experts.formats[bits].nested
        views.append(view_in_store(store, layer, expert, (bits // 2, bits) if nested else (bits,)))
    found = []
    for kernel in (CpuKernel(isa="torch"), CpuKernel()):  # the device's in these tests, and the CPU worker's
        out = x.new_zeros(ids.numel(), x.shape[1])
        kernel.begin(x, LayerPlan.of_experts(grouped, views), out, Activation.SILU)
        kernel.compute(range(len(views)))
        found.append(out)
    on_cpu = (actions % LOW_VERSION == Action.CPU).flatten().unsqueeze(1)
    return combine(torch.where(on_cpu, found[1], found[0]), weights, own)


def device_planned(store, policy, ratio, folder, **options):
    """Serve on a device whose kernel differs from the CPU's in the last bits.

    Returns its answers, their actions, and its counts.
    """
    options |= {"misses": "share", "trace": str(folder)}
    with rates_of(ratio), mock.patch.object(expert_server, "make_kernel", return_value=CpuKernel(isa="torch")):
        server = device_planned_server(store, "50%", policy, **options)
    outs, found = [], []
    for step in steps_of_both_layers(store.experts):
        small, layers = len(step[0][0]) <= SMALL_BATCH_ROWS, []
        for layer, of_layer in enumerate(step):
            outs.append((decode if small else run_large_batch)(server, layer, *of_layer))
            if not small:
                layers.append(server.small_batches.large.actions(of_layer[2]))
        found.append(
            torch.stack(layers or [server.small_batches.actions(layer, step[layer][2]) for layer in range(2)], 1)
        )
    counts = server.small_batches.table.counters.sum(0)
    check_device_planned(server)
    server.close(keep_store=True)
    return outs, torch.cat(found), counts


def all_equal(outs, want):
    return all(map(torch.equal, outs, want))


@needs_library
@pytest.mark.parametrize(
    ("nested", "low", "reuse_high"), [(False, 2, True), (False, 2, False), (False, 0, True), (True, 2, True)]
)
def test_actions_that_a_device_decided_bring_its_answer_again(nested, low, reuse_high, tmp_path):
    """In small batches and large ones, each expert's record agrees with the counts."""
    store = make_store(make_experts(layers=2, nested=nested))
    policy = Dymoe(retention=0.5, high_by="depth", reuse_high=reuse_high)
    want, actions, counts = device_planned(store, policy, 3, tmp_path, low=low)
    steps, places = list(steps_of_both_layers(store.experts)), itertools.accumulate(OF_STEPS, initial=0)
    told = [actions[first : first + len(step[0][0])] for first, step in zip(places, steps, strict=False)]
    given = [
        (layer, *of_layer, one[:, layer])
        for one, step in zip(told, steps, strict=True)
        for layer, of_layer in enumerate(step)
    ]
    assert all_equal([repeated(store, *of_layer) for of_layer in given], want)
    fetched = [(*rest, one - (one % LOW_VERSION == Action.CPU).to(torch.uint8)) for *rest, one in given]
    assert not all_equal([repeated(store, *of_layer) for of_layer in fetched], want), "who computed decides about bits"
    kinds, first = actions % LOW_VERSION, 0
    found = dict.fromkeys(Action, 0)
    for tokens, step in zip(OF_STEPS, steps_of_both_layers(store.experts), strict=True):
        for layer, (_, _, ids) in enumerate(step):
            of_experts = zip(
                ids.flatten().tolist(), kinds[first : first + tokens, layer].flatten().tolist(), strict=True
            )
            for expert, action in set(of_experts):
                found[action] += expert >= 0
                assert expert >= 0 or action == Action.SKIP
        first += tokens
    for action, counter in (
        (Action.HIT, "HITS"),
        (Action.STREAM, "STREAMED"),
        (Action.CPU, "CPU_EXECUTED"),
        (Action.SKIP, "SKIPPED"),
    ):
        # Streamed experts are counted by slice.
        assert found[action] == counts[Counter[counter]] or (nested and action is Action.STREAM)
    assert found[Action.ADMIT] > 0 < found[Action.CPU]
    assert (actions >= LOW_VERSION).any() == (low > 0)
