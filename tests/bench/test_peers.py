"""Peers of the benchmark: which of them can run here, and their flags."""

import json

from tests.cli.checkpoints import command, refused
from vllm_dymoe.bench import run
from vllm_dymoe.bench.cases import Subject, Workload, grid
from vllm_dymoe.bench.prompts import PromptSet

WORKLOAD = Workload("digest", "prompts", False, 2, 1, 8)


def test_a_missing_peer_is_left_out_and_an_unknown_one_refused(tmp_path, monkeypatch):
    measured = []

    def measure(cases, *_, **__):
        measured.extend(case.subject.label for case in cases)
        raise SystemExit(7)

    monkeypatch.setattr("vllm_dymoe.cli.bench.measure", measure)
    asked = ["bench", "benchmarks/tiny_moe/model", "--out", tmp_path, "--budget", "25%", "--policy", "exact"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = command(*asked, "--peer", "vllm-offload", "--peer", "vllm")
    assert "vllm-offload is left out" in result.stdout
    assert measured == ["exact", "full load, 4 bits", "vllm"]
    assert "not a known peer" in refused(*asked, "--peer", "nothing")


def test_flags_are_options_and_arguments_of_the_engine(tmp_path, monkeypatch):
    measured = []

    def measure(cases, *_, **__):
        measured.extend(cases)
        raise SystemExit(7)

    monkeypatch.setattr("vllm_dymoe.cli.bench.measure", measure)
    asked = "--policy exact --budget 25% --tp 2 --ep --misses fetch --misses compute --disk 2GB/s --link 10MB/s"
    command("bench", "benchmarks/tiny_moe/model", "--out", tmp_path, *asked.split())
    assert {tuple(case.engine.items()) for case in measured} == {
        (("tensor_parallel_size", 2), ("enable_expert_parallel", True))
    }
    found = [
        tuple(case.subject.options[name] for name in ("misses", "disk_gbps", "link_gbps"))
        for case in measured if case.budget == "25%"
    ]  # fmt: skip
    assert found == [("fetch", 2.0, 0.01), ("compute", 2.0, 0.01)]


def test_vllm_is_told_to_offload_what_the_budget_leaves():
    (case,) = grid("m", [Subject("vllm-offload", peer="vllm-offload")], ["25%"], [1], WORKLOAD, {"seed": 3})
    job = run.job_of([case], PromptSet("p"), run.Path("out"), expert_bytes=8 * 2**30)
    assert job["engine"] == {"seed": 3, "cpu_offload_gb": 6.0, "cpu_offload_params": ["experts"]}
    json.dumps(job)
