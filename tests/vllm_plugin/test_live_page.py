"""The live page in a headless browser, with the real routes and server."""

import json
import re
import shutil
import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

from tests.executor.steps import STEPS, make_server, run
from tests.vllm_plugin.steps import prompt, rank_of, scheduled
from vllm_dymoe.vllm_plugin import worker
from vllm_dymoe.vllm_plugin.endpoint import PAGE, DymoeEndpoint
from vllm_dymoe.vllm_plugin.worker import DymoeWorkerExtension

api = pytest.importorskip("playwright.sync_api", reason="playwright, which drives the browser, is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on PATH (apt install chromium)")
KEY = "secret"


class Engine:
    """Calls the worker's methods as vLLM's client does; runs a step before each call."""

    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=1))

    def __init__(self, rank):
        self.rank, self.steps, self.down = rank, 0, False

    async def collective_rpc(self, method, timeout, kwargs):
        if self.down:
            raise RuntimeError("the engine is dead")
        if method == "dymoe_live":
            self.steps += 1
            self.rank.step.begin(scheduled(4, 1, new=[prompt("a", range(4))]))
            run(self.rank.server, STEPS[self.steps % len(STEPS) :][:1])
        try:
            return [json.loads(json.dumps(getattr(DymoeWorkerExtension(), method)(**kwargs)))]
        except ValueError as error:
            said = f"Worker failed with error '{error}', please check the stack trace above for the root cause"
            raise Exception(f"Call to collective_rpc method failed: {said}") from error


@pytest.fixture
def engine(memory_store, monkeypatch):
    rank = rank_of(make_server(memory_store, "40%", "dymoe"))
    monkeypatch.setattr(worker, "_rank", lambda extension: rank)
    monkeypatch.setattr(worker, "_server", lambda extension: rank.server)
    return Engine(rank)


@pytest.fixture
def address(engine):
    plugin = DymoeEndpoint()

    @asynccontextmanager
    async def begin(app):  # the test's own thread runs playwright's event loop
        await plugin.init_state(engine, app.state, None)
        yield

    app = FastAPI(lifespan=begin)
    plugin.attach_router(app)
    app.add_middleware(AuthenticationMiddleware, tokens=[KEY])
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}{PAGE}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser():
    api.expect.set_options(timeout=60_000)  # returns as soon as it is so; a busy machine takes long
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    """Open the page and enter the key; an error in its console fails the test."""
    page, problems = browser.new_page(viewport={"width": 1280, "height": 900}), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(address)
    page.get_by_label("API key").fill(KEY)
    page.get_by_role("button", name="Use it").click()
    api.expect(page.locator("#state")).to_have_text("live")
    yield page
    page.close()
    assert not problems


def test_it_shows_what_is_resident_and_what_flows(page, engine, tmp_path):
    expect, server = api.expect, engine.rank.server
    figures = page.locator("#charts figure")
    for number in (0, 1, 2):  # charts of decoded tokens, prompt tokens and hits
        expect(figures.nth(number).locator("strong span")).to_have_text(re.compile(r"[1-9]"))
    expect(page.locator("#legend")).to_contain_text(f"in {server.slot_plan.slots['high']} slots")
    page.locator("#map").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    layer = server.experts.layers[1]
    expect(page.locator("#cell")).to_contain_text(f"Layer {layer}, expert 1: ")
    looks = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        looks.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(looks) == 2


def test_controls_change_the_server_and_show_what_it_refuses(page, engine):
    expect, server = api.expect, engine.rank.server
    answer = page.locator("#answer")
    page.get_by_label("Expert budget").fill("80%")
    page.keyboard.press("Enter")
    expect(answer).to_have_text("expert_budget is 80% now.")
    expect(page.locator("#legend")).to_contain_text(f"in {server.slot_plan.slots['high']} slots")
    page.get_by_label("Expert budget").fill("1")
    page.keyboard.press("Enter")
    expect(answer).to_contain_text("vllm-dymoe: ")
    page.get_by_label("retention").fill("0.5")
    page.get_by_role("button", name="Change the precision").click()
    expect(answer).to_have_text("retention is 0.5 now.")
    assert server.policy.retention == 0.5


def test_a_server_that_is_down_is_said_to_be(page, engine):
    engine.down = True
    api.expect(page.locator("#state")).to_have_text("The server answered 500.")
    engine.down = False
    api.expect(page.locator("#state")).to_have_text("live")
