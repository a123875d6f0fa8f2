"""Misses that the host computes where they lie, beside an emulated device: the same bits at every budget and share."""

import json
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from tests.runtime.decided import check_decided, decided_runtime, rates_of, run_decided
from tests.runtime.steps import BUDGETS, STEPS, ByNumber, forward, random_step, run, with_budget
from tests.small_model import make_experts, make_store
from vllm_dymoe.kernels import CpuKernel, native
from vllm_dymoe.observe.timeline import Lane
from vllm_dymoe.residency.constants import Cost
from vllm_dymoe.runtime import host_side
from vllm_dymoe.runtime.moe import start_timeline, stop_timeline
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
        assert len(runtime.host_side.doorbell.spans(0.0)) > 0
        runtime.close(keep_store=True)


@needs_library
def test_an_answer_that_does_not_come_fails_its_step_and_everything_is_fetched_from_then_on():
    store = make_store(make_experts(layers=2))
    want = run_decided(decided_runtime(store, "100%", "exact", lo=0), STEPS)
    said = []
    with mock.patch.object(native.Library, "answer", return_value=None):  # the poller is gone
        runtime = decided_runtime(store, "25%", "exact", lo=0, misses="compute", transfer_timeout_s=0.2)
        runtime.host_side.doorbell.on_failure = said.append
        begun = time.monotonic()
        got = []
        for step in STEPS:
            runtime.decode.settle()  # as where a step begins
            got += run_decided(runtime, [step])
        took = time.monotonic() - begun
    assert "has not computed" in said[0]
    assert "transfer_timeout_s, which is 0.2 seconds" in said[0]
    wrong = [number for number, (a, b) in enumerate(zip(want, got, strict=True)) if not torch.equal(a, b)]
    assert len(wrong) <= 1, "steps behind the one that failed are whole again"
    assert runtime.host_side.doorbell.failed
    assert took < 5
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


def test_a_timeline_shows_what_the_host_computes_beside_the_device(memory_store):
    runtime = with_budget(memory_store, "minimum", misses="compute", link_gbps=FAST)
    run(runtime, STEPS[:4])
    start_timeline(runtime)
    run(runtime, STEPS[:8])
    lane = list(Lane).index(Lane.BESIDE)
    assert [event for event in stop_timeline(runtime) if event["tid"] == lane and event["ph"] == "X"]
    runtime.close(keep_store=True)
