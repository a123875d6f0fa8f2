"""The HTTP routes, on an app as vLLM makes it, with an engine that answers."""

import asyncio
import tomllib
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_dymoe.vllm_adapter.worker import ROUTES, PrecisionEndpoint

ROOT = Path(__file__).resolve().parents[2]
PATH, PREDICTOR = ROUTES


class Engine:
    """Keeps what it is told; fails as vLLM's client does, with the worker's sentence behind its own words."""

    retention = 0.75

    file = None

    async def collective_rpc(self, method, kwargs):
        if method == "dymoe_predictor":
            if kwargs.get("file") == "bad":
                said = "vllm-dymoe: predictor bad is not a file."
                said = f"Worker failed with error '{said}', please check the stack trace above for the root cause"
                raise Exception(f"Call to collective_rpc method failed: {said}")
            self.file = kwargs.get("file", self.file)
            return [{"file": self.file, "card": None}]
        assert method == "dymoe_precision"
        if kwargs.get("retention", 0) > 1:
            raise Exception("Call to collective_rpc method failed: vllm-dymoe: the precision stays as it was: no.")
        if "crash" in kwargs:
            raise RuntimeError("the engine is dead")
        self.retention = kwargs.get("retention", self.retention)
        return [{"policy_options": {"retention": self.retention}}] * 2


@pytest.fixture
def client():
    app, plugin = FastAPI(), PrecisionEndpoint()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(Engine(), app.state, None))
    return TestClient(app, raise_server_exceptions=False)


def test_it_is_what_vllm_loads():
    assert isinstance(PrecisionEndpoint(), EndpointPlugin)
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.endpoint_plugins"]
    assert resolve_obj_by_qualname(entries[PrecisionEndpoint.name].replace(":", ".")) is PrecisionEndpoint


def test_an_api_key_guards_it():
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    assert all(path.startswith(GUARDED_PREFIX) for path in ROUTES)


def test_asking_changes_nothing_and_a_change_is_answered(client):
    assert client.get(PATH).json() == {"ranks": [{"policy_options": {"retention": 0.75}}] * 2}
    assert client.post(PATH, json={"retention": 0.5}).json()["ranks"][1] == {"policy_options": {"retention": 0.5}}
    assert client.get(PATH).json()["ranks"][0] == {"policy_options": {"retention": 0.5}}


def test_what_is_refused_is_the_clients_mistake(client):
    answer = client.post(PATH, json={"retention": 2})
    assert answer.status_code == 400
    assert answer.json() == {"detail": "vllm-dymoe: the precision stays as it was: no."}
    assert client.post(PATH, json=[1]).status_code == 422


def test_what_fails_otherwise_is_not(client):
    assert client.post(PATH, json={"crash": 1}).status_code == 500


def test_a_predictor_is_taken_over_or_the_old_one_goes_on(client):
    assert client.get(PREDICTOR).json() == {"ranks": [{"file": None, "card": None}]}
    assert client.post(PREDICTOR, json={"file": "/a/predictor"}).json()["ranks"][0]["file"] == "/a/predictor"
    answer = client.post(PREDICTOR, json={"file": "bad"})
    assert (answer.status_code, answer.json()) == (400, {"detail": "vllm-dymoe: predictor bad is not a file."})
    assert client.get(PREDICTOR).json()["ranks"][0]["file"] == "/a/predictor"
