"""The dashboard asks for metrics that exist, with labels that they have."""

import json
import re
from pathlib import Path

import pytest

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
