"""The workers' methods, on servers without an engine."""

import base64
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from tests.cache.store.stores import write
from tests.errors import refused
from tests.executor.device_planned import run_on_card
from tests.executor.steps import STEPS, make_server, run
from tests.small_model import make_experts
from tests.vllm_plugin.steps import prompt, rank_of, scheduled
from vllm_dymoe.cache.host_cache import HostCache
from vllm_dymoe.cache.store import whole_host_cache
from vllm_dymoe.options import ConfigError
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.table import CODES
from vllm_dymoe.prefetch import PredictorError
from vllm_dymoe.server.live import SCORE_BITS, pack_cells
from vllm_dymoe.vllm_plugin import worker
from vllm_dymoe.vllm_plugin.worker import DymoeWorkerExtension


def test_a_predictor_is_written_when_it_is_asked_for(monkeypatch):
    rank = SimpleNamespace(training=None, server=SimpleNamespace(asks_trained=False))
    monkeypatch.setattr(worker, "_rank", lambda extension: rank)
    assert DymoeWorkerExtension().dymoe_predictor() is None
    rank.training = SimpleNamespace(report=lambda: {"tokens": 7})
    assert DymoeWorkerExtension().dymoe_predictor() == {"tokens": 7, "asked": False}

    def report():
        raise PredictorError("no space.")

    rank.training = SimpleNamespace(report=report)
    with pytest.raises(ConfigError, match="vllm-dymoe: no space"):
        DymoeWorkerExtension().dymoe_predictor()


@pytest.mark.parametrize(
    "changes", [{"self": 1}, {"changes": {}}, {"": 1}, {"high": [4]}, {"high": {"a": 1}}, {"low": None}]
)
def test_changes_of_any_name_and_kind_are_refused_with_a_sentence(changes, memory_store, monkeypatch):
    """Changes arrive as keywords, as vLLM passes them."""
    server = make_server(memory_store, "100%", "dymoe")
    monkeypatch.setattr(worker, "_server", lambda extension: server)
    name = next(iter(changes))
    with refused("^vllm-dymoe: ", option=name):
        DymoeWorkerExtension().dymoe_precision(**changes)


@pytest.mark.parametrize("budget", [[4], {"a": 1}, "", "nan", -1, True])
def test_a_budget_of_any_kind_is_refused_with_a_sentence(budget, memory_store, monkeypatch):
    server = make_server(memory_store, "100%")
    monkeypatch.setattr(worker, "_server", lambda extension: server)
    for option in ("expert_budget", "host_memory"):
        with pytest.raises(ConfigError, match="vllm-dymoe: "):
            DymoeWorkerExtension().dymoe_resize(**{option: budget})


def test_two_budgets_change_together_or_not_at_all(tmp_path, monkeypatch):
    experts = make_experts()
    whole = whole_host_cache(experts)
    host_cache = HostCache(write(tmp_path, experts), whole // 2)
    server = make_server(host_cache, "50%", link_gbps=50.0)
    monkeypatch.setattr(worker, "_server", lambda extension: server)
    run_on_card(server, STEPS)
    plan, held = server.slot_plan, dict(host_cache.slots.held)
    ours = DymoeWorkerExtension()
    for budgets in (
        {"host_memory": whole * 3 // 4, "expert_budget": "1KiB"},
        {"host_memory": "1KiB", "expert_budget": "25%"},
        {"host_memory": "auto", "expert_budget": "25%"},
    ):
        for change in (partial(ours.dymoe_check, "dymoe_resize", budgets), partial(ours.dymoe_resize, **budgets)):
            with refused("^vllm-dymoe: "):
                change()
            assert (server.slot_plan, host_cache.slots.limit, host_cache.slots.held) == (plan, whole // 2, held)
    budgets = {"host_memory": whole * 3 // 4, "expert_budget": "25%"}
    ours.dymoe_check("dymoe_resize", budgets)
    assert (server.slot_plan, host_cache.slots.limit) == (plan, whole // 2), "a check changes nothing"
    ours.dymoe_resize(**budgets)
    assert server.slot_plan.limit < plan.limit
    assert host_cache.slots.limit == whole * 3 // 4
    server.close()


def test_on_a_cpu_both_budgets_limit_the_same_memory(memory_store, monkeypatch):
    server = make_server(memory_store, "50%")
    monkeypatch.setattr(worker, "_server", lambda extension: server)
    plan = server.slot_plan
    with refused("same memory"):
        DymoeWorkerExtension().dymoe_resize(expert_budget="75%", host_memory="60%")
    assert server.slot_plan == plan
    DymoeWorkerExtension().dymoe_resize(expert_budget="25%", host_memory="60%")
    assert server.slot_plan == make_server(memory_store, "25%").slot_plan


def test_a_check_of_precision_changes_nothing(memory_store, monkeypatch):
    server = make_server(memory_store, "100%", "dymoe")
    monkeypatch.setattr(worker, "_server", lambda extension: server)
    options, cache = server.options, server.cache
    for changes in ({"retention": 0.25}, {"low": 0}, {"high": 2, "low": 0}):
        DymoeWorkerExtension().dymoe_check("dymoe_precision", changes)
    with refused(option="retention"):
        DymoeWorkerExtension().dymoe_check("dymoe_precision", {"retention": 2})
    assert (server.options, server.cache) == (options, cache)


@pytest.mark.parametrize("policy", ["exact", "dymoe", "dynaexq"])
def test_the_live_state_says_what_the_table_says(policy, memory_store, monkeypatch):
    server = make_server(memory_store, "90%", policy)
    run(server, STEPS[:6])
    rank = rank_of(server)
    monkeypatch.setattr(worker, "_rank", lambda extension: rank)
    rank.step.begin(scheduled(5, 1, 3, drafted={"c": 2}, new=[prompt("a", range(5))]))
    rank.step.begin(scheduled(1, reading=["a"]))
    state = DymoeWorkerExtension().dymoe_live()
    table = server.cache.table
    cells = np.frombuffer(base64.b64decode(state["cells"]), np.uint8).reshape(table.layers, table.experts)
    assert np.array_equal(cells >> SCORE_BITS, table.precision)
    assert (len(state["layers"]), state["experts"]) == cells.shape
    assert state["resident"] == {
        name: int((table.precision == CODES[Precision(name)]).sum()) for name in state["slots"]
    }
    assert sum(state["resident"].values()) > 0
    counts, stats = state["counts"], server.stats()
    assert (counts["prompt_tokens"], counts["decoded_tokens"]) == (6, 4)
    assert (counts["hits"], counts["misses"], counts["link_bytes"]) == (
        stats.hits, stats.misses, sum(stats.bytes_moved.values())
    )  # fmt: skip
    if policy == "dymoe":
        assert state["precision"]["parameters"]["retention"]["value"] == 0.75
        assert state["precision"]["parameters"]["high_by"]["enum"] == ["threshold", "depth", "equal"]


def test_a_cell_is_a_precision_and_a_share_of_the_layers_largest_score():
    precision = np.array([[0, 1, 2, 2], [0, 0, 0, 0]], np.int8)
    score = np.array([[0, 1, 500, 1000], [0, 0, 0, 0]], np.int64)
    cells = pack_cells(precision, score)
    assert np.array_equal(cells >> SCORE_BITS, precision)
    assert (cells & 63).tolist() == [[0, 1, 32, 63], [0, 0, 0, 0]], "whatever was used is not cold"
