"""The HTTP routes, on an app as vLLM creates it, with an engine that answers."""

import asyncio
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.plugins.endpoint_plugins.interface import EndpointPlugin
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_dymoe.vllm_plugin.endpoint import BUDGET, LIVE, PAGE, PRECISION, PREDICTOR, DymoeEndpoint, LiveAnswers

ROOT = Path(__file__).resolve().parents[2]
CHANGES = ("dymoe_precision", "dymoe_resize")
REFUSED = "vllm-dymoe: the precision stays as it was: no."


class Engine:
    """Records its calls, and fails as vLLM's client does.

    The client puts its own words before the worker's sentence.
    """

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    def __init__(self):
        self.state = {"retention": 0.75}
        self.calls = []
        self.short = False  # whether memory has become short after the check

    async def collective_rpc(self, method, timeout, kwargs):
        changes = method in CHANGES and bool(kwargs)
        assert timeout is None if changes or method in ("dymoe_check", "dymoe_predictor") else timeout > 0
        self.calls.append((method, kwargs))
        if method == "dymoe_check":
            assert kwargs.keys() == {"method", "changes"}
            assert kwargs["method"] in CHANGES
            kwargs = kwargs["changes"]
        if kwargs.get("retention", 0) > 1 or (self.short and changes):
            said = f"Worker failed with error '{REFUSED}', please check the stack trace above for the root cause"
            raise Exception(f"Call to collective_rpc method failed: {said}")
        if "crash" in kwargs:
            raise RuntimeError("the engine is dead")
        if method == "dymoe_precision":
            self.state |= kwargs
        return [dict(self.state)] * 2


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def client(engine):
    app, plugin = FastAPI(), DymoeEndpoint()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine, app.state, None))
    return TestClient(app, raise_server_exceptions=False)


def test_it_is_what_vllm_loads_and_an_api_key_guards():
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    assert isinstance(DymoeEndpoint(), EndpointPlugin)
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.endpoint_plugins"]
    assert resolve_obj_by_qualname(entries[DymoeEndpoint.name].replace(":", ".")) is DymoeEndpoint
    assert all(path.startswith(GUARDED_PREFIX) for path in (PRECISION, BUDGET, LIVE, PREDICTOR))
    assert not PAGE.startswith(GUARDED_PREFIX), "a browser cannot send the key before it has the page"


def test_asking_changes_nothing_and_a_change_is_answered(client):
    before, after = {"retention": 0.75}, {"retention": 0.5}
    assert client.get(PRECISION).json() == {"ranks": [before] * 2}
    assert client.post(PRECISION, json=after).json() == {"ranks": [after] * 2}
    assert client.get(PRECISION).json() == {"ranks": [after] * 2}


def test_what_is_refused_is_the_clients_mistake_and_what_fails_otherwise_is_not(client):
    answer = client.post(PRECISION, json={"retention": 2})
    assert (answer.status_code, answer.json()) == (400, {"detail": REFUSED})
    assert client.post(PRECISION, json=[1]).status_code == 422
    assert client.post(PRECISION, json={"crash": 1}).status_code == 500
    assert client.get(PRECISION).json()["ranks"][0] == {"retention": 0.75}


def test_every_rank_is_asked_before_one_changes(client, engine):
    client.post(PRECISION, json={"retention": 2})
    assert [method for method, _ in engine.calls] == ["dymoe_check"]
    engine.short = True
    answer = client.post(PRECISION, json={"retention": 0.5})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith(f"{REFUSED} Other ranks may have changed")


def test_a_predictor_is_written_when_it_is_asked_for(client, engine):
    assert client.post(PREDICTOR).status_code == 200
    assert engine.calls == [("dymoe_predictor", {})]


def test_a_budget_reaches_the_workers_and_nothing_else_does(client, engine):
    assert client.post(BUDGET, json={"expert_budget": "50%"}).status_code == 200
    budget = {"expert_budget": "50%"}
    check = "dymoe_check", {"method": "dymoe_resize", "changes": budget}
    assert engine.calls == [check, ("dymoe_resize", budget)]
    assert client.post(BUDGET, json={"crash": 1}).status_code == 400
    assert client.post(BUDGET, json={}).status_code == 400
    assert len(engine.calls) == 2


def test_pages_that_ask_together_cost_one_question(engine):
    async def ask(interval):
        answers = LiveAnswers(engine, interval)
        await asyncio.gather(*(answers.answer() for _ in range(5)))

    asyncio.run(ask(3600))
    assert len(engine.calls) == 1
    asyncio.run(ask(0))
    assert len(engine.calls) == 1 + 5


def test_the_page_names_no_other_host(client):
    page = client.get(f"{PAGE}/")
    assert page.headers["content-type"].startswith("text/html")
    for name in ("index.html", "live.css", "live.js"):
        text = client.get(f"{PAGE}/{name}").text
        assert text
        assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
