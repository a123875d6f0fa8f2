"""`vllm-dymoe serve` on this machine: what it prints, and a server that answers."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import openai
import pytest

from tests.e2e.engines import MODEL, answer, engine, prompts, server_of
from tests.e2e.test_server import BIN, Server, run_until_it_ends
from vllm_dymoe.cache.store import MANIFEST
from vllm_dymoe.quantize.packer import JOURNAL

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return {"VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache"))}


def test_the_choice_is_printed_and_the_same_again(cache):
    command = [BIN / "vllm-dymoe", "serve", MODEL, "--dry-run", "--max-model-len", "512"]
    first, second = (run_until_it_ends(command, **cache) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert "all in memory, computed in place" in " ".join(first.stdout.split())
    for line in ("machine", "policy", "precision", "dense layers", "experts", "context", "KV cache", "expected"):
        assert re.search(rf"^{line}", first.stdout, re.MULTILINE), line
    kept = [re.search(r"^((?:\w+=\S+ )*vllm serve .*)$", of.stdout, re.MULTILINE)[1] for of in (first, second)]
    assert kept[0] == kept[1]
    words = shlex.split(kept[0])
    options = json.loads(words[words.index("--additional-config") + 1])["dymoe"]
    assert options["expert_budget"] == "top-k"


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


START = """
import os, sys
from vllm import LLM, SamplingParams
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
options = {"dymoe": {"high": 8, "quantizer": "hqq"}}
llm = LLM(sys.argv[1], quantization="dymoe", max_model_len=128, enforce_eager=True, additional_config=options)
(answer,) = llm.generate(["The SELECT statement"], SamplingParams(max_tokens=8, temperature=0))
print("ANSWER", answer.outputs[0].token_ids)
"""


def start(store, log):
    environment = {**os.environ, "DYMOE_STORE_DIR": str(store), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with log.open("w") as output:
        return subprocess.Popen([sys.executable, "-c", START, MODEL], stdout=output, stderr=output, env=environment)


def test_a_first_start_that_is_killed_goes_on(tmp_path):
    """After SIGKILL in the middle of packing, the next start packs the other layers.

    The answer is that of a start that was not interrupted.
    """
    store, log = tmp_path / "store", tmp_path / "log"
    killed = start(store, log)

    def packed():
        return sum(len(path.read_text().splitlines()) - 1 for path in store.rglob(JOURNAL))

    while killed.poll() is None and packed() < 2:
        time.sleep(1e-3)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL, log.read_text()[-2000:]
    before = packed()
    assert 2 <= before < 8
    assert not list(store.rglob(MANIFEST)), "a killed start leaves no store"
    answers = []
    for folder in (store, tmp_path / "other store"):
        assert start(folder, log).wait() == 0, log.read_text()[-2000:]
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


def test_where_nothing_is_set_the_choice_is_that_of_the_command(cache, tmp_path):
    command = [BIN / "vllm-dymoe", "serve", MODEL, "--dry-run", "--max-model-len", "128"]
    printed = run_until_it_ends(command, **cache).stdout
    words = shlex.split(re.search(r"^(?:\w+=\S+ )*(vllm serve .*)$", printed, re.MULTILINE)[1])
    options = json.loads(words[words.index("--additional-config") + 1])["dymoe"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CACHE_ROOT", cache["VLLM_CACHE_ROOT"])
        with engine(quantization="dymoe", max_model_len=128) as llm:
            chosen = llm.llm_engine.vllm_config.additional_config["dymoe"]
            assert {name: chosen[name] for name in options} == options
            served = server_of(llm).options
            assert served.high == options.get("high", served.high)
            assert served.host_store == options["host_store"]
