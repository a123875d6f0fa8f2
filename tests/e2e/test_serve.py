"""`vllm-dymoe serve` on this machine: what it prints, and a server that answers."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.engines import MODEL, answer, engine, prompts, server_of
from tests.e2e.test_server import BIN, Server, run_until_it_ends
from tests.support.forked import started
from vllm_dymoe.cache.store import MANIFEST
from vllm_dymoe.cache.store.writer import JOURNAL
from vllm_dymoe.plan.here import STARTS

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture(scope="module")
def choose(cache):
    """Return a function that returns what the command prints, which starts nothing."""

    def printed():
        done = run_until_it_ends([BIN / "vllm-dymoe", "serve", MODEL, "--dry-run", "--max-model-len", "512"], **cache)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return printed


@pytest.fixture(scope="module")
def chosen(choose):
    return choose()


def command_of(text):
    return re.search(r"^((?:\w+=\S+ )*vllm serve .*)$", text, re.MULTILINE)[1]


def options_of(text):
    words = shlex.split(command_of(text))
    return json.loads(words[words.index("--additional-config") + 1])["dymoe"]


def test_the_choice_is_printed_and_the_same_again_if_nothing_disturbed_it(cache, choose, chosen):
    assert "all in memory, computed in place" in " ".join(chosen.split())
    for line in ("machine", "policy", "precision", "dense layers", "experts", "context", "KV cache", "expected"):
        assert re.search(rf"^{line}", chosen, re.MULTILINE), line
    assert options_of(chosen)["expert_budget"] == "top-k"
    kept = list(Path(cache["VLLM_CACHE_ROOT"]).rglob(STARTS))
    if "not kept" in chosen:  # other tests use the cores meanwhile
        assert kept == []
    else:
        assert len(kept) == 1
        assert command_of(choose()) == command_of(chosen)


class OneCommand(Server):
    """A server started by this project's command instead of vLLM's."""

    def launch(self, command, output, environment):
        command = [BIN / "vllm-dymoe", *command]
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)


def test_it_becomes_a_server_that_answers(cache, tmp_path, monkeypatch):
    for name, value in cache.items():
        monkeypatch.setenv(name, value)
    server = OneCommand(MODEL, tmp_path / "log")
    try:
        server.wait_until_ready()
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.completions.create(model="tiny", prompt="The SELECT statement", max_tokens=8, temperature=0)
        assert answer.usage.completion_tokens == 8
    finally:
        server.stop()
    log = server.log.read_text()
    (line,) = [line for line in log.splitlines() if "is active" in line]
    assert "policy exact" in line
    chosen = re.search(r"^precision +(\d+) bits", log, re.MULTILINE)[1]
    assert f"high = {chosen} bits" in line
    assert "computed" in line or "CPU" in line


def print_an_answer(store):
    from vllm import LLM, SamplingParams

    os.environ["DYMOE_STORE_DIR"] = store  # after the import of engines.py, which sets another one
    options = {"dymoe": {"high": 8, "quantizer": "hqq"}}
    llm = LLM(str(MODEL), quantization="dymoe", max_model_len=128, enforce_eager=True, additional_config=options)
    (answer,) = llm.generate(["The SELECT statement"], SamplingParams(max_tokens=8, temperature=0))
    print("ANSWER", answer.outputs[0].token_ids)


def start(store, log):
    with log.open("w") as output:
        return started(print_an_answer, str(store), output=output, env=dict(os.environ))


def status(process):
    process.join()
    return process.exitcode


def test_a_first_start_that_is_killed_goes_on(tmp_path):
    """After SIGKILL in the middle of packing, the next start packs the other layers.

    The answer is that of a start that was not interrupted.
    """
    store, log = tmp_path / "store", tmp_path / "log"
    killed = start(store, log)

    def packed():
        return sum(len(path.read_text().splitlines()) - 1 for path in store.rglob(JOURNAL))

    while killed.is_alive() and packed() < 2:
        time.sleep(1e-3)
    killed.kill()
    assert status(killed) == -signal.SIGKILL, log.read_text()[-2000:]
    before = packed()
    assert 2 <= before < 8
    assert not list(store.rglob(MANIFEST)), "a killed start leaves no store"
    answers = []
    for folder in (store, tmp_path / "other store"):
        assert status(start(folder, log)) == 0, log.read_text()[-2000:]
        said = log.read_text()
        answers.append(re.search(r"^ANSWER .*$", said, re.MULTILINE)[0])
        if folder == store:
            assert f"of 8 layers {before} are packed already" in said
            shown = re.findall(r"Quantizing experts: +(\d+)%", said)
            assert int(shown[0]) == pytest.approx(100 * before / 8, abs=1), "progress goes on where it was"
    assert answers[0] == answers[1]
    assert not list(store.rglob(JOURNAL))


def test_16_bit_experts_are_served_from_the_checkpoint(tmp_path):
    store, answers = tmp_path / "store", []
    for options in ({"host_store": "pinned"}, {"host_store": "file"}):
        with engine(dymoe={"high": 16, "store_dir": str(store), **options}) as llm:
            answers.append([found.tokens for found in answer(llm, prompts()[:4], 8)])
            llm.collective_rpc("dymoe_check_integrity")
            described = server_of(llm).store.files.description if "pinned" in options.values() else ""
        if described:
            assert described.startswith("the checkpoint's own files")
            assert not list(store.rglob("*.safetensors")), "no second copy"
    assert answers[0] == answers[1]
    assert list(store.rglob("*.safetensors")), "a copy that a CPU maps"


def test_where_nothing_is_set_the_choice_is_that_of_the_command(cache, chosen):
    options = options_of(chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", cache["VLLM_CACHE_ROOT"])
        with engine(quantization="dymoe") as llm:
            given = llm.llm_engine.vllm_config.additional_config["dymoe"]
            assert {name: given[name] for name in options} == options
            served = server_of(llm).options
            assert served.high == options.get("high", served.high)
            assert served.host_store == options["host_store"]
