"""Systems behind emulated links, at the rate that was asked for or as slow beside computation as a card's link."""

import pytest

from tests.support.benchmarks import BENCHMARKS
from vllm_dymoe.bench.cases import Workload
from vllm_dymoe.bench.prompts import read_prompts
from vllm_dymoe.cli import bench

SHIPPED = BENCHMARKS / "tiny_moe" / "model"


def test_every_system_is_measured_behind_every_link(tmp_path, monkeypatch):
    asked = []

    def measure(cases, *_, **__):
        asked.append(list(cases))
        return [{"measured": {"tpot_ms": {"mean": 8.0}}} for _ in asked[-1]]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.Bench, "report", lambda *_: None)
    workload = Workload("digest", "shipped", False, 2, 1, 8)
    run = bench.Bench(str(SHIPPED), read_prompts("shipped"), workload, {}, {}, tmp_path)
    run.compare(["exact", "firm"], [], ["25%"], [1], ["10MB/s", "rtx3090"])
    alone, cases = asked
    assert [case.budget for case in alone] == ["100%"]
    rates = {(case.subject.options["system"], case.subject.options.get("link_gbps")) for case in cases}
    (emulated,) = {rate for _, rate in rates} - {0.01, None}
    assert {("exact", 0.01), ("exact", emulated), ("firm", 0.01), ("firm", emulated)} <= rates
    assert emulated == pytest.approx(0.0115, rel=0.5)
