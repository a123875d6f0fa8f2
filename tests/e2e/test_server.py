"""`vllm serve` on a checkpoint of `vllm-dymoe quantize`, with openai's client."""

import base64
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.engines import MODEL, prompts
from tests.e2e.test_faults import cut, damaged
from tests.support.forked import started
from tests.support.ports import free_port
from vllm_dymoe.cache.store import Manifest
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.server.live import SCORE_BITS
from vllm_dymoe.vllm_plugin.metrics import METRICS

pytestmark = pytest.mark.engine

BIN = Path(sys.executable).parent


def run_until_it_ends(command, **environment):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=os.environ | environment, check=False
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-4bit"
    done = run_until_it_ends([BIN / "vllm-dymoe", "quantize", MODEL, "-o", folder, "--high", "4", "--low", "2"])
    assert done.returncode == 0, done.stderr
    return folder


def run_vllm(arguments):
    """Run what the ``vllm`` command runs."""
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *arguments]
    main()


class Server:
    def __init__(self, model, log, *arguments):
        self.log, self.port = log, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = ["serve", str(model), "--port", str(self.port), "--host", "127.0.0.1", "--served-model-name", "tiny"]
        command += ["--max-model-len", "512", "--enforce-eager", *arguments]
        # The engine core is a process of its own, as it is for users; other tests may have set it otherwise.
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
        environment |= {"VLLM_LOG_STATS_INTERVAL": "1", "VLLM_PLUGINS": "dymoe"}
        with log.open("w") as output:
            self.process = psutil.Process(self.launch(command, output, environment).pid)

    def launch(self, command, output, environment):
        return started(run_vllm, command, output=output, env=environment)

    def wait_until_ready(self):
        for _ in range(3600):
            assert not self.has_ended(), f"the server ended:\n{self.log.read_text()[-5000:]}"
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"the server is not ready after 360 s:\n{self.log.read_text()[-5000:]}")

    def has_ended(self):
        return not self.process.is_running() or self.process.status() == psutil.STATUS_ZOMBIE

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(120)
        except psutil.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    """A server without --quantization, since the checkpoint names its method.

    Every expert is at high precision until a test lowers the retention.
    """
    policy = {"policy": "dymoe", "policy_options": {"retention": 1, "look_ahead": 0}}
    options = json.dumps({"dymoe": {"expert_budget": "25%"} | policy})
    server = Server(checkpoint, tmp_path_factory.mktemp("server") / "log", "--additional-config", options)
    server.wait_until_ready()
    yield server
    server.stop()


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def complete(client, prompt, **options):
    settings = {"model": "tiny", "prompt": prompt, "max_tokens": 16, "temperature": 0}
    return client.completions.create(**(settings | options))


def test_one_loud_line_says_what_is_active(server, checkpoint):
    lines = [line for line in server.log.read_text().splitlines() if "is active" in line]
    assert len(lines) == 1
    for part in ("8 MoE layers x 32 experts", "high = 4 bits", "64 slots", "budget", "policy dymoe", str(checkpoint)):
        assert part in lines[0], part


def test_completions_streams_and_chats(client):
    whole = complete(client, prompts()[0])
    assert whole.usage.completion_tokens == 16
    pieces = [event.choices[0].text for event in complete(client, prompts()[0], stream=True)]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].text != ""
    messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does Tom have?"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=24, temperature=0)
    assert answer.choices[0].message.content.strip()


def rpc(server, method, *arguments):
    answer = httpx.post(f"{server.url}/collective_rpc", json={"method": method, "args": list(arguments)}, timeout=60)
    answer.raise_for_status()
    return answer.json()["results"]


def test_statistics_and_live_resizing(client, server):
    before = complete(client, prompts()[1], max_tokens=24).choices[0].text
    stats = rpc(server, "dymoe_stats")[0]
    assert stats["hits"] > 0
    assert stats["bytes_moved"]["demand"] > 0
    assert stats["peak_expert_bytes"] <= stats["budget_bytes"]
    assert rpc(server, "dymoe_resize", "50%")[0]["slots"]["high"] == 128
    assert complete(client, prompts()[1], max_tokens=24).choices[0].text == before
    rpc(server, "dymoe_check_integrity")


def test_a_fault_is_an_error_500_with_its_sentence_and_the_server_goes_on(server, checkpoint):
    client, path = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0), checkpoint / file_name(4)

    def chat(client, prompt, **settings):
        messages = [{"role": "user", "content": prompt}]
        return client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, **({"temperature": 0} | settings)
        )

    def texts():
        return complete(client, prompts()[0]).choices[0].text, chat(client, prompts()[0]).choices[0].message.content

    rpc(server, "dymoe_resize", "2%")
    want = texts()
    for settings in ({}, {"n": 2, "temperature": 1.0}):
        with damaged(path, cut):
            for ask in (complete, chat):
                with pytest.raises(openai.InternalServerError) as caught:
                    ask(client, prompts()[0], **settings)
                # vLLM's responses contain no paths; the log names the file.
                assert re.search(r"vllm-dymoe: \S+ ends at byte .* the file was truncated", caught.value.message)
            with pytest.raises(openai.APIError, match="truncated"):
                list(complete(client, prompts()[0], stream=True))
        assert texts() == want
        rpc(server, "dymoe_check_integrity")
    rpc(server, "dymoe_resize", "25%")
    log = server.log.read_text()
    assert log.count(f"vllm-dymoe: {path} ends at byte") >= 6
    assert "EngineDeadError" not in log


def planned(client, server):
    rpc(server, "dymoe_reset_stats")
    complete(client, prompts()[1])
    return rpc(server, "dymoe_stats")[0]["planned"]


def test_a_client_changes_precision_over_http(client, server):
    def change(changes=None, **named):
        (rank,) = client.post("/dymoe/precision", body=named if changes is None else changes, cast_to=object)["ranks"]
        return rank

    before = complete(client, prompts()[1]).choices[0].text
    (rank,) = client.get("/dymoe/precision", cast_to=object)["ranks"]
    assert (rank["high"], rank["low"], rank["policy_options"]) == (4, 2, {"retention": 1, "look_ahead": 0})
    assert planned(client, server)["low"] == 0
    try:
        stream = complete(client, prompts()[2], max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        rpc(server, "dymoe_reset_stats")
        assert change(retention=0.5)["policy_options"] == {"retention": 0.5, "look_ahead": 0}
        assert sum(1 for _ in stream) > 100, "the answer went on"
        counts = rpc(server, "dymoe_stats")[0]["planned"]
        assert counts["low"] > 0, "and did so with less precision"
        assert change(low=0)["low"] == 0
        counts = planned(client, server)
        assert counts["skipped"] > 0
        assert counts["low"] == 0
        with pytest.raises(openai.BadRequestError, match="stays"):
            change(retention=2)
        with pytest.raises(openai.BadRequestError, match="16 bits"):
            change(high=16)
        for changes in ({"hi": [4]}, {"high": [4]}, {"self": 1}, {"": 1}):
            with pytest.raises(openai.BadRequestError, match="vllm-dymoe: "):
                change(changes)
        (rank,) = client.get("/dymoe/precision", cast_to=object)["ranks"]
        assert (rank["low"], rank["policy_options"]) == (0, {"retention": 0.5, "look_ahead": 0})
    finally:
        change(retention=1, low=2)
    assert complete(client, prompts()[1]).choices[0].text == before
    rpc(server, "dymoe_check_integrity")


def live(server):
    answer = httpx.get(f"{server.url}/v1/dymoe/live", timeout=60)
    answer.raise_for_status()
    (rank,) = answer.json()["ranks"]
    cells = np.frombuffer(base64.b64decode(rank["cells"]), np.uint8).reshape(len(rank["layers"]), rank["experts"])
    assert len(answer.content) < 8192, "it is asked for once a second"
    return rank, cells >> SCORE_BITS, cells & ((1 << SCORE_BITS) - 1)


def test_the_live_page_is_served_with_what_is_resident_and_what_flows(client, server):
    page = httpx.get(f"{server.url}/dymoe/live", follow_redirects=True)
    assert page.headers["content-type"].startswith("text/html")
    assert httpx.get(f"{server.url}/dymoe/live/live.js").status_code == 200
    before, _, _ = live(server)
    used = complete(client, prompts()[2], max_tokens=24).usage
    time.sleep(1)  # all readers within a second get the same sample
    rank, held, scores = live(server)
    assert held.shape == (8, 32)
    stats = rpc(server, "dymoe_stats")[0]
    assert np.count_nonzero(held == 2) == rank["resident"]["high"] == stats["resident_experts"]["high"]
    assert (scores.max(1) == 63).all(), "every layer has an expert with the largest score"
    grown = {name: rank["counts"][name] - before["counts"][name] for name in rank["counts"]}
    # The prompt's step gives the first token, so it is not counted here. A step scheduled ahead may follow the last.
    assert 0 <= grown["decoded_tokens"] - (used.completion_tokens - 1) <= 1
    assert grown["prompt_tokens"] > 0
    assert grown["hits"] + grown["misses"] > 0
    assert grown["cpu_seconds"] > 0
    answer = httpx.post(f"{server.url}/v1/dymoe/budget", json={"expert_budget": "30%"}, timeout=60)
    assert 64 < answer.json()["ranks"][0]["slots"]["high"] < 128
    refused = httpx.post(f"{server.url}/v1/dymoe/budget", json={"expert_budget": 1000}, timeout=60)
    assert refused.status_code == 400
    assert "vllm-dymoe: " in refused.text
    rpc(server, "dymoe_resize", "25%")


def metrics(server):
    """Return the plugin's samples in /metrics.

    Keys are the metric's name and its labels other than model and rank.
    """
    text = httpx.get(f"{server.url}/metrics").text
    assert "vllm:generation_tokens_total" in text, "vLLM's own metrics are gone"
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("vllm_dymoe_") and not sample.name.endswith("_created"):
                labels = dict(sample.labels)
                assert (labels.pop("model_name"), labels.pop("rank")) == ("tiny", "0")
                found[sample.name, *labels.values()] = sample.value
    return found


GAUGES = {metric.full_name for metric in METRICS if metric.gauge}


def by_metric(stats):
    """Return a rank's statistics as ``metrics`` returns them."""
    return {(metric.full_name, *key): value for metric in METRICS for key, value in metric.values(stats).items()}


def until(condition):
    """Wait for what the server publishes once a second."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it is not published within 60 s")


def test_metrics_say_what_the_workers_count(client, server, checkpoint):
    # No request runs, so that all counts are published when a new budget is.
    for budget in ("31%", "25%"):
        rpc(server, "dymoe_resize", budget)
        (counted,) = rpc(server, "dymoe_stats")
        until(lambda: metrics(server).get(("vllm_dymoe_budget_bytes",)) == counted["budget_bytes"])  # noqa: B023
    before = metrics(server)
    complete(client, prompts()[2], max_tokens=24)

    def all_published():
        """Tell if the last step is, which may follow the answer."""
        nonlocal after, stats
        after, (stats,) = metrics(server), rpc(server, "dymoe_stats")
        names = ("hits", "misses")
        return all(
            after[f"vllm_dymoe_{n}_total",] - before[f"vllm_dymoe_{n}_total",] == stats[n] - counted[n] for n in names
        )

    after, stats = before, counted
    until(all_published)
    grown = {key: after[key] - before[key] for key in after}
    was, now = by_metric(counted), by_metric(stats)
    assert after.keys() == now.keys()
    for key, value in now.items():
        published = after[key] if key[0] in GAUGES else grown[key] + was[key]
        assert published == pytest.approx(value), key
    assert grown["vllm_dymoe_misses_total",] > 0
    for name in ("hits", "misses", "cpu_executed", "evictions"):
        assert grown[f"vllm_dymoe_{name}_total",] == stats[name] - counted[name], name
    moved = grown["vllm_dymoe_transferred_bytes_total", "demand"]
    # Misses that the CPU executes from the page cache are not copied.
    fetched = grown["vllm_dymoe_misses_total",] - grown["vllm_dymoe_cpu_executed_total",]
    assert moved == fetched * Manifest.read(checkpoint).experts.formats[4].whole_nbytes
    needed = grown["vllm_dymoe_hits_total",] + grown["vllm_dymoe_misses_total",]
    assert needed == sum(grown["vllm_dymoe_planned_total", precision] for precision in ("high", "low"))
    # In each of 8 layers, 23 or 24 decoded tokens need 4 experts each, and the prompt needs 4 to 32.
    assert 8 * (23 * 4 + 4) <= needed <= 8 * (24 * 4 + 32)
    assert after["vllm_dymoe_budget_bytes",] == stats["budget_bytes"]
    assert after["vllm_dymoe_resident_experts", "high"] == stats["resident_experts"]["high"]
    assert 0 < after["vllm_dymoe_resident_experts", "high"] <= after["vllm_dymoe_slots", "high"] == 64


def test_two_front_ends_share_one_engine(checkpoint, tmp_path):
    server = Server(checkpoint, tmp_path / "log", "--api-server-count", "2")
    server.wait_until_ready()
    try:
        said = set()
        for _ in range(8):  # each on its own connection, which either front end may accept
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            said.add(complete(client, "The", max_tokens=4).choices[0].text)
            client.close()
        assert len(said) == 1
        assert len([line for line in server.log.read_text().splitlines() if "is active" in line]) == 1
        assert any("ApiServer_1" in line for line in server.log.read_text().splitlines())
    finally:
        server.stop()


def test_a_mistake_ends_the_start_with_one_sentence(checkpoint):
    options = '{"dymoe": {"expert_budget": 1000}}'
    done = run_until_it_ends([BIN / "vllm", "serve", checkpoint, "--enforce-eager", "--additional-config", options])
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "set expert_budget to at least" in last, done.stderr[-3000:]
    assert "Loading safetensors" not in done.stdout + done.stderr, "the mistake was found after loading began"
