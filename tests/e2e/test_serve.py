"""`vllm-dymoe serve` on this machine: what it prints, and a server that answers."""

import json
import re
import shlex
import subprocess

import openai
import pytest

from tests.e2e.engines import MODEL
from tests.e2e.test_server import BIN, Server, run_until_it_ends

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
    """Started by this project's command in place of vLLM's, as a user starts it."""

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
    assert "high = 4 bits" in line
    assert "computed" in line or "CPU" in line
