"""Systems behind emulated links, at the rates that were asked for."""

from tests.support.benchmarks import BENCHMARKS
from vllm_dymoe.bench.cases import Workload
from vllm_dymoe.bench.prompts import read_prompts
from vllm_dymoe.cli import bench

SHIPPED = BENCHMARKS / "tiny_moe" / "model"


def test_every_system_is_measured_behind_every_link(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "measure", lambda cases, *_, **__: asked.extend(cases))
    monkeypatch.setattr(bench.Bench, "report", lambda *_: None)
    workload = Workload("digest", "shipped", False, 2, 1, 8)
    run = bench.Bench(str(SHIPPED), read_prompts("shipped"), workload, {}, {}, tmp_path)
    run.compare(["exact", "firm"], ["vllm"], ["25%"], [1], ["10MB/s", "2GB/s"])
    rates = {(case.subject.label, (case.subject.options or {}).get("link_gbps")) for case in asked}
    assert rates == {(system, rate) for system in ("exact", "firm") for rate in (0.01, 2.0)} | {
        ("full load, 4 bits", None), ("vllm", None)
    }  # fmt: skip
