"""Misses that the host computes where they lie, beside an emulated device: the same bits at every budget and share."""

import json
import threading
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.runtime.decided import check_decided, decided_runtime, decode, decode_wide, rates_of, run_decided
from tests.runtime.replayed import replay
from tests.runtime.steps import BUDGETS, STEPS, ByNumber, forward, random_step, run, with_budget
from tests.small_model import make_experts, make_store
from vllm_dymoe.kernels import CpuKernel, native
from vllm_dymoe.residency.constants import LOW_VERSION, Cost, Fate
from vllm_dymoe.residency.routing import Routing
from vllm_dymoe.residency.table import Counter
from vllm_dymoe.residency.wide_rule import narrow_parts
from vllm_dymoe.runtime import host_side, moe
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.transfer import TransferError

MIXED = Dymoe(retention=0.5, high_by="depth", reuse_high=False)
FAST = 100.0
"""1e9 bytes per second of an emulated link, for tests in which only results count."""

needs_library = pytest.mark.skipif(native.load() is None, reason="the native library was not built here")


@pytest.mark.parametrize("system", [None, ByNumber(low=frozenset({0, 3}), skipped=frozenset({5}))])
@pytest.mark.parametrize(
    ("misses", "ratio"), [("compute", 0), ("share", 2), ("share", 3), ("share", 8), ("share", 0.5)]
)
def test_no_share_changes_a_bit_in_the_hosts_steps(memory_store, system, misses, ratio):
    """Prompts among them: rows of cold experts are computed while the link brings the others."""
    want = run(with_budget(memory_store, "100%", system), STEPS)
    for budget in BUDGETS[1:]:
        with rates_of(ratio):
            runtime = with_budget(memory_store, budget, system, misses=misses, link_gbps=FAST)
        got = run(runtime, STEPS)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), budget
        stats = runtime.stats()
        assert stats.there > 0
        assert stats.transfers["demand"] > 0 or misses == "compute"
        assert stats.there + stats.transfers["demand"] >= stats.misses
        runtime.close(keep_store=True)


@needs_library
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("misses", "ratio"), [("compute", 0), ("share", 3)])
def test_no_share_changes_a_bit_where_the_device_decides(nested, misses, ratio):
    """Through the doorbell: a thread answers while this one computes hits; wide steps fetch."""
    store, system = make_store(make_experts(layers=2, nested=nested)), MIXED
    want = run_decided(decided_runtime(store, "100%", system), STEPS)
    for budget in BUDGETS[1:]:
        with rates_of(ratio):
            runtime = decided_runtime(store, budget, system, misses=misses)
        got = run_decided(runtime, STEPS)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), budget
        stats = runtime.stats()
        assert stats.hits + stats.misses == stats.planned["hi"] + stats.planned["lo"]
        assert stats.there > 0
        check_decided(runtime)
        assert int(runtime.host_side.doorbell.ring.bell.answered) > 0
        runtime.close(keep_store=True)


@needs_library
@pytest.mark.parametrize(("misses", "ratio"), [("compute", 0), ("share", 8)])
def test_wide_steps_whose_misses_the_host_computes_are_narrow_ones_one_behind_the_other(misses, ratio):
    """Two, and none in a step of the whole budget; rows behind the tokens are none of any."""
    store = make_store(make_experts(layers=2, num_experts=24))
    steps = [(seed, seed % 2, rows, tokens) for seed, (rows, tokens) in enumerate([(17, 17), (32, 19), (33, 33)])]
    host, asked = decided_runtime(store, "100%", "exact", lo=0), []
    for budget in ("minimum", "25%", "100%"):
        with rates_of(ratio):
            runtime = decided_runtime(store, budget, "exact", lo=0, misses=misses)
        for seed, layer, rows, tokens in steps:
            given = random_step(seed, rows, store.experts)
            before = runtime.stats().there
            out = decode_wide(runtime, layer, *given, rows=tokens)
            assert torch.equal(out, decode_wide(host, layer, *given, rows=tokens)), (budget, rows)
            asked.append(runtime.stats().there > before)
            check_decided(runtime)
        runtime.close(keep_store=True)
    assert asked == [True, True, False] * 2 + [False] * 3


def test_narrow_steps_take_the_place_of_a_wide_one_where_the_count_says_so():
    """Of Qwen3-30B-A3B beside a host of three times the link's rate; not where hardly anything is missing."""
    costs = np.array([[20, 0, 0, 0], [0] * 4, [1000, 333, 67, 16]])

    def parts(tokens, missing=0.75, costs=costs, experts=128):
        return narrow_parts(tokens, DECODE_ROWS, 8, experts, missing, costs)

    assert [parts(tokens) for tokens in (17, 32, 33)] == [2, 2, 0]
    assert parts(32, missing=0) == 0
    assert parts(32, costs=0 * costs) == 0
    slow = costs * [[1], [1], [1]] + [[0] * 4, [0] * 4, [0, 3000, 0, 0]]
    assert parts(32, costs=slow) == 0, "the link brings everything twice"


@needs_library
def test_an_answer_that_does_not_come_fails_its_step_and_everything_is_fetched_from_then_on():
    store = make_store(make_experts(layers=2))
    want = run_decided(decided_runtime(store, "100%", "exact", lo=0), STEPS)
    said = []
    with mock.patch.object(native.Library, "answer", return_value=None):  # the poller is gone
        runtime = decided_runtime(store, "25%", "exact", lo=0, misses="compute", transfer_timeout_s=0.2)
        runtime.host_side.doorbell.on_failure = said.append
        got = []
        for step in STEPS:
            runtime.decode.settle()  # as where a step begins
            got += run_decided(runtime, [step])
    assert "has not computed" in said[0]
    assert "transfer_timeout_s, which is 0.2 seconds" in said[0]
    assert runtime.decode.costs is None
    wrong = [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not torch.equal(a, b)]
    assert len(wrong) <= 1, "steps behind the one that failed are whole again"
    assert runtime.host_side.doorbell.failed
    runtime.close(keep_store=True)


def test_a_layer_that_takes_too_long_beside_the_device_fails_its_step(memory_store):
    runtime = with_budget(memory_store, "minimum", lo=0, misses="compute", link_gbps=FAST, transfer_timeout_s=0.2)
    x = random_step(0, 5, memory_store.experts)
    want = forward(runtime, 0, *x)
    hung, compute = threading.Event(), CpuKernel.compute
    with mock.patch.object(runtime.host_side.worker._kernel, "compute", side_effect=lambda *_: hung.wait()):
        with pytest.raises(TransferError, match="computed a layer's experts within transfer_timeout_s"):
            forward(runtime, 0, *x)
        hung.set()
    assert compute is CpuKernel.compute
    assert torch.equal(forward(runtime, 0, *x), want)
    runtime.check_integrity()
    runtime.close(keep_store=True)


def test_the_first_starts_measure_rates_and_the_best_is_kept(memory_store, tmp_path):
    """Of link and host, each while the other works. Others, and what cannot be read, are measured anew."""
    kept = tmp_path / "rates.json"

    def rates(link_gbps=0.001):
        runtime = with_budget(memory_store, "50%", misses="share", link_gbps=link_gbps, rates=kept)
        found, costs = runtime.host_side.rates, runtime.memory.table.there
        assert costs[2, Cost.LINK] == round(1e9 * memory_store.experts.formats[4].nbytes / found.link)
        runtime.close(keep_store=True)
        return found

    first = rates()
    assert first.link == pytest.approx(1e6, rel=0.5)
    assert first.describe(memory_store.experts).startswith("0.0 GB/s of the link and ")
    measured = [replace(first, first_row={tag: s / n for tag, s in first.first_row.items()}) for n in (8, 2)]
    with mock.patch.object(host_side, "measure", side_effect=measured) as measure:
        assert rates() == replace(measured[0], measured=2)
        assert rates() == replace(measured[0], measured=3), "the best of three"
        assert rates() == replace(measured[0], measured=3)
        assert measure.call_count == 2
    assert rates(link_gbps=0.002).measured == 1, "of another link"
    kept.write_text(json.dumps({"link": 3}))
    assert rates().measured == 1


@pytest.mark.parametrize(("misses", "ratio"), [("compute", 0), ("share", 8)])
@pytest.mark.parametrize("tokens", [9, 40])
def test_of_a_wide_step_the_host_computes_experts_of_few_rows_while_the_link_brings_the_others(
    memory_store, misses, ratio, tokens
):
    """Half of the pairs fall on two experts, which have more than `misses_rows` rows; nothing is resident."""
    experts, most = memory_store.experts, tokens // 4
    with rates_of(ratio):
        runtime = with_budget(memory_store, "minimum", lo=0, misses=misses, misses_rows=most, link_gbps=FAST)
    x, weights, _ = random_step(tokens, tokens, experts)
    hot, rest = torch.arange(tokens) % 2, 2 + torch.arange(tokens) % (experts.num_experts - 2)
    ids = torch.stack([hot, rest], 1).int()
    rows = torch.bincount(ids.flatten())
    assert 0 < int((rows > most).sum()) < int((rows > 0).sum())
    forward(runtime, 0, *random_step(1, 40, experts))  # finds the free places
    runtime.reset_stats()
    held = runtime.memory.table.tier[0] > 0
    out = forward(runtime, 0, x, weights, ids)
    stats, far = runtime.stats(), torch.tensor(~held) & (rows > 0)
    few = int((far & (rows <= most)).sum())
    assert stats.there == few if misses == "compute" else 0 < stats.there <= few
    assert stats.transfers["demand"] == int(far.sum()) - stats.there > 0
    assert torch.equal(out, forward(with_budget(memory_store, "100%", lo=0), 0, x, weights, ids))
    runtime.close(keep_store=True)


OF_STEPS = (1, 1, 7, 40) * 4


def steps_of_both_layers(experts):
    """With an expert of another rank in some."""
    for number, tokens in enumerate(OF_STEPS):
        step = [random_step(2 * number + layer, tokens, experts) for layer in range(2)]
        for _, _, ids in step[number % 3 :]:
            ids[0, 0] = -1
        yield step


def answers(store, budget, system, ratio, fates=None, **options):
    """What the host's steps give, and their fates; the device's kernel has other last bits than the host's."""
    with rates_of(ratio), mock.patch.object(moe, "make_kernel", return_value=CpuKernel(isa="torch")):
        runtime = with_budget(store, budget, system, misses="share", link_gbps=FAST, **options)
    runtime.serving.records_fates = True
    if fates is not None:
        replay(runtime, fates)
    outs, found = [], []
    for step in steps_of_both_layers(store.experts):
        routings = [Routing(layer, 2, x, ids, weights) for layer, (x, weights, ids) in enumerate(step)]
        outs += map(runtime.serving.forward, routings)
        found.append(torch.stack([routing.fates for routing in routings], 1))
    runtime.check_integrity()
    runtime.close(keep_store=True)
    return outs, torch.cat(found)


def decided(store, system, ratio, folder, **options):
    """The same where the device decides, and the number of experts that it counted of each fate."""
    options |= {"misses": "share", "trace": str(folder)}
    with rates_of(ratio), mock.patch.object(moe, "make_kernel", return_value=CpuKernel(isa="torch")):
        runtime = decided_runtime(store, "50%", system, **options)
    outs, found = [], []
    for step in steps_of_both_layers(store.experts):
        narrow, layers = len(step[0][0]) <= DECODE_ROWS, []
        for layer, of_layer in enumerate(step):
            outs.append((decode if narrow else decode_wide)(runtime, layer, *of_layer))
            if not narrow:
                layers.append(runtime.decode.wide.fates(of_layer[2]))
        found.append(torch.stack(layers or [runtime.decode.fates(layer, step[layer][2]) for layer in range(2)], 1))
    counts = runtime.decode.table.counters.sum(0)
    check_decided(runtime)
    runtime.close(keep_store=True)
    return outs, torch.cat(found), counts


def all_equal(outs, want):
    return all(map(torch.equal, outs, want))


@needs_library
@pytest.mark.parametrize("budget", ["minimum", "100%"])
def test_recorded_fates_bring_an_answer_again_that_depends_on_them(memory_store, budget):
    """The rates have changed meanwhile."""
    system = ByNumber(low=frozenset({0, 3}), skipped=frozenset({5}))
    want, fates = answers(memory_store, "50%", system, 3)
    assert {0, 1, 2, Fate.THERE, Fate.SKIP, LOW_VERSION + Fate.THERE} <= set(fates.flatten().tolist())
    assert not all_equal(answers(memory_store, budget, system, 0.5)[0], want)
    assert all_equal(answers(memory_store, budget, system, 0.5, fates)[0], want)


@needs_library
@pytest.mark.parametrize(
    ("nested", "lo", "reuse_high"), [(False, 2, True), (False, 2, False), (False, 0, True), (True, 2, True)]
)
def test_fates_that_a_device_decided_bring_its_answer_again(nested, lo, reuse_high, tmp_path):
    """In the host's steps, narrow and wide; every expert is recorded as it was counted."""
    store = make_store(make_experts(layers=2, nested=nested))

    def system():
        return Dymoe(retention=0.5, high_by="depth", reuse_high=reuse_high)

    want, fates, counts = decided(store, system(), 3, tmp_path, lo=lo)
    for budget in ("minimum", "100%"):
        assert all_equal(answers(store, budget, system(), 0.5, fates, lo=lo)[0], want), budget
    kinds, first = fates % LOW_VERSION, 0
    found = dict.fromkeys(Fate, 0)
    for tokens, step in zip(OF_STEPS, steps_of_both_layers(store.experts), strict=True):
        for layer, (_, _, ids) in enumerate(step):
            of_experts = zip(
                ids.flatten().tolist(), kinds[first : first + tokens, layer].flatten().tolist(), strict=True
            )
            for expert, fate in set(of_experts):
                found[fate] += expert >= 0
                assert expert >= 0 or fate == Fate.SKIP
        first += tokens
    for fate, counter in ((Fate.HIT, "HITS"), (Fate.PASS, "PASSED"), (Fate.THERE, "THERE"), (Fate.SKIP, "SKIPPED")):
        assert found[fate] == counts[Counter[counter]] or (nested and fate is Fate.PASS)  # counted by slices
    assert found[Fate.KEEP] > 0 < found[Fate.THERE]
    assert (fates >= LOW_VERSION).any() == (lo > 0)
