"""The HTTP route, on an app as vLLM makes it, with an engine that answers."""

import asyncio
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.utils.import_utils import resolve_obj_by_qualname

from tests.executor.steps import make_server
from vllm_dymoe.options import ConfigError
from vllm_dymoe.prefetch import PredictorError
from vllm_dymoe.vllm_plugin import worker
from vllm_dymoe.vllm_plugin.worker import PATH, PREDICTOR_PATH, DymoeWorkerExtension, PrecisionEndpoint

ROOT = Path(__file__).resolve().parents[2]
REFUSED = "vllm-dymoe: the precision stays as it was: no."


class Engine:
    """Keeps what it is told; fails as vLLM's client does, with the worker's sentence behind its own words."""

    def __init__(self):
        self.state = {"retention": 0.75}

    async def collective_rpc(self, method, kwargs):
        if method == "dymoe_predictor":
            return [{"tokens": 7}]
        assert method == "dymoe_precision"
        if kwargs.get("retention", 0) > 1:
            said = f"Worker failed with error '{REFUSED}', please check the stack trace above for the root cause"
            raise Exception(f"Call to collective_rpc method failed: {said}")
        if "crash" in kwargs:
            raise RuntimeError("the engine is dead")
        self.state |= kwargs
        return [dict(self.state)] * 2


@pytest.fixture
def client():
    app, plugin = FastAPI(), PrecisionEndpoint()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(Engine(), app.state, None))
    return TestClient(app, raise_server_exceptions=False)


def test_it_is_what_vllm_loads_and_an_api_key_guards():
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    assert isinstance(PrecisionEndpoint(), EndpointPlugin)
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.endpoint_plugins"]
    assert resolve_obj_by_qualname(entries[PrecisionEndpoint.name].replace(":", ".")) is PrecisionEndpoint
    assert all(path.startswith(GUARDED_PREFIX) for path in (PATH, PREDICTOR_PATH))


def test_asking_changes_nothing_and_a_change_is_answered(client):
    before, after = {"retention": 0.75}, {"retention": 0.5}
    assert client.get(PATH).json() == {"ranks": [before] * 2}
    assert client.post(PATH, json=after).json() == {"ranks": [after] * 2}
    assert client.get(PATH).json() == {"ranks": [after] * 2}


def test_what_is_refused_is_the_clients_mistake_and_what_fails_otherwise_is_not(client):
    answer = client.post(PATH, json={"retention": 2})
    assert (answer.status_code, answer.json()) == (400, {"detail": REFUSED})
    assert client.post(PATH, json=[1]).status_code == 422
    assert client.post(PATH, json={"crash": 1}).status_code == 500
    assert client.get(PATH).json()["ranks"][0] == {"retention": 0.75}


def test_a_predictor_is_written_when_it_is_asked_for(client, monkeypatch):
    assert client.post(PREDICTOR_PATH).json() == {"ranks": [{"tokens": 7}]}
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
    """As vLLM hands them over: by keyword."""
    server = make_server(memory_store, "100%", "dymoe")
    monkeypatch.setattr(worker, "_server", lambda extension: server)
    name = next(iter(changes))
    with pytest.raises(ConfigError, match=f"vllm-dymoe: .*{name}"):
        DymoeWorkerExtension().dymoe_precision(**changes)


@pytest.mark.parametrize("budget", [[4], {"a": 1}, "", "nan", -1, True])
def test_a_budget_of_any_kind_is_refused_with_a_sentence(budget, memory_store, monkeypatch):
    server = make_server(memory_store, "100%")
    monkeypatch.setattr(worker, "_server", lambda extension: server)
    for option in ("expert_budget", "host_memory"):
        with pytest.raises(ConfigError, match="vllm-dymoe: "):
            DymoeWorkerExtension().dymoe_resize(**{option: budget})
