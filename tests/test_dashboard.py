"""The dashboard asks for metrics that exist, with labels that they have."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.checkpoints import command, refused
from vllm_dymoe.vllm_adapter.metrics import METRICS

DASHBOARD = json.loads((Path(__file__).resolve().parents[1] / "docs" / "grafana" / "dymoe.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
OURS = {metric.full_name: {*metric.labels} for metric in METRICS}


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_metrics_and_labels_that_exist(query):
    for name, selector in re.findall(r"\b(vllm_dymoe_\w+)\{([^}]*)\}", query):
        assert name in OURS
        assert {label for label, _ in re.findall(r"(\w+)=~?(\")", selector)} <= OURS[name]
    named = re.findall(r"\bvllm_dymoe_\w+", query)
    grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(",")} - {"le"}
    for name in named:
        assert grouped <= OURS[name]
    assert query.count("(") == query.count(")")


def test_every_metric_is_on_the_dashboard():
    assert set(re.findall(r"\bvllm_dymoe_\w+", " ".join(QUERIES))) == set(OURS)


def test_legends_name_labels_that_a_query_keeps():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert not kept or any(label in group for group in kept), target


def test_results_of_vllms_client_become_one_table(tmp_path):
    for concurrency in (16, 1, 4):
        found = {"max_concurrency": concurrency, "completed": 8, "output_throughput": 10.0 * concurrency,
                 "median_ttft_ms": 5, "p99_ttft_ms": 6, "median_tpot_ms": 7, "p99_tpot_ms": 8}  # fmt: skip
        (tmp_path / f"{concurrency}.json").write_text(json.dumps(found))
    result = command("served", tmp_path)
    assert re.findall(r"│ +(\d+) +│ +8 │ +([\d.]+) │", result.stdout) == [("1", "10.0"), ("4", "40.0"), ("16", "160.0")]


def test_a_folder_of_something_else_is_refused(tmp_path):
    assert "no result" in refused("served", tmp_path)
    (tmp_path / "x.json").write_text("[]")
    assert "x.json" in refused("served", tmp_path)
