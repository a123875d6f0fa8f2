"""Systems behind emulated links, at the rate that was asked for or as slow beside computation as a card's link."""

import pytest

from tests.support.benchmarks import BENCHMARKS
from vllm_dymoe.cli import bench

SHIPPED = BENCHMARKS / "tiny_moe" / "model"


def test_every_system_is_measured_behind_every_link(tmp_path, monkeypatch):
    asked = []

    def measure(cases, *_, **__):
        asked.append(list(cases))
        return [{"measured": {"tpot_ms": {"mean": 8.0}}} for _ in asked[-1]]

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "report", lambda *_, **__: None)
    bench.run(
        str(SHIPPED), systems=["exact", "firm"], peers=[], budgets=["25%"], batches=[1], links=["10MB/s", "rtx3090"],
        prompts="shipped", requests=2, warm_up=1, max_tokens=8, temperature=0.0, options={}, engine={}, out=tmp_path,
    )  # fmt: skip
    alone, cases = asked
    assert [case.budget for case in alone] == ["100%"]
    rates = {(case.subject.options["system"], case.subject.options.get("link_gbps")) for case in cases}
    (emulated,) = {rate for _, rate in rates} - {0.01, None}
    assert {("exact", 0.01), ("exact", emulated), ("firm", 0.01), ("firm", emulated)} <= rates
    assert emulated == pytest.approx(0.0115, rel=0.5)
