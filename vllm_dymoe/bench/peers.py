"""What else serves a model, beside this plugin in the same table; ``python -m`` this module answers a peer's job.

What has no Python of its own to call is measured through its server: ``--peer http://localhost:8080``.
"""

import hashlib
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from vllm_dymoe.bench.prompts import random_tokens
from vllm_dymoe.bench.rows import append_row
from vllm_dymoe.bench.summary import Answers, distribution, peak_bytes, summarise
from vllm_dymoe.config import ExpertBudget

ENGINE = "vllm_dymoe.vllm_adapter.measure"
_HERE = "vllm_dymoe.bench.peers"
_LLAMA_PROMPT = 64  # tokens: llama-bench makes them up
Job = Mapping[str, Any]


@dataclass(frozen=True)
class Peer:
    """How something else is measured."""

    module: str = _HERE  # the program that answers a job
    missing: Callable[[], str | None] = lambda: None  # why it cannot run here, in a sentence; None if it can
    engine: Callable[[float, int], Mapping[str, Any]] = lambda share, expert_bytes: {}
    """From the share of experts that may stay on the device, and the bytes of all, to arguments of vLLM's LLM."""
    takes_budgets: bool = False  # whether that share means anything to it


def _left_out(name: str, why: str, found: Callable[[], object]) -> Callable[[], str | None]:
    return lambda: None if found() else f"{name} is left out: {why}."


_NO_GPU = "it offloads from a GPU, and there is none"
PEERS: dict[str, Peer] = {
    "vllm": Peer(ENGINE),
    # Zero-copy, of as many bytes as are not to be on the device.
    "vllm-offload": Peer(
        ENGINE,
        _left_out("vLLM's --cpu-offload-gb", _NO_GPU, torch.cuda.is_available),
        lambda share, nbytes: {"cpu_offload_gb": (1 - share) * nbytes / 2**30, "cpu_offload_params": ["experts"]},
        takes_budgets=True,
    ),
    # Whole layers: of each group of ten so many are not on the device.
    "vllm-prefetch": Peer(
        ENGINE,
        _left_out("vLLM's prefetch offloader", _NO_GPU, torch.cuda.is_available),
        lambda share, _: {
            "offload_group_size": 10,
            "offload_num_in_group": max(1, min(9, round(10 * (1 - share)))),
            "offload_params": ["experts"],
        },
        takes_budgets=True,
    ),
    "accelerate": Peer(
        missing=_left_out("accelerate", "`pip install accelerate` brings it", lambda: find_spec("accelerate"))
    ),
    "llama.cpp": Peer(
        missing=_left_out("llama.cpp", "llama-bench is not on the PATH", lambda: shutil.which("llama-bench")),
        takes_budgets=True,
    ),
}


def find_peer(name: str) -> Peer | None:
    """By name, or a server by its address; None if nothing of the name is known."""
    return Peer() if name.startswith(("http://", "https://")) else PEERS.get(name)


def accelerate(job: Job, case: Job) -> dict[str, Any]:
    """transformers with accelerate, greedy, one request at a time: layers without a place are read for every token."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    workload, model = case["workload"], job["model"]
    device_map: Any = "auto"
    if not torch.cuda.is_available():  # everything has room: put layers on disk, as those of a larger model would be
        kept = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
        layers = range(AutoConfig.from_pretrained(model).num_hidden_layers)
        device_map = kept | {f"model.layers.{layer}": "disk" for layer in layers}
    count = workload["warm_up"] + workload["requests"]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        network = AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", device_map=device_map, offload_folder=folder
        )
        if job["random_length"]:
            prompts = random_tokens(network.config.vocab_size, job["random_length"], count)
        else:
            tokenizer = AutoTokenizer.from_pretrained(model)
            prompts = [tokenizer.encode(text) for text, _ in job["prompts"][:count]]

        def tokens(prompt: list[int]) -> Iterable[int]:
            past, given = None, torch.tensor([prompt], device=network.device)
            for _ in range(workload["max_tokens"]):
                result = network(input_ids=given, past_key_values=past, use_cache=True)
                past, given = result.past_key_values, result.logits[:, -1:].argmax(-1)
                yield int(given)

        found = [_timed(tokens(prompt), len(prompt)) for prompt in prompts]
    return summarise(found[workload["warm_up"] :]) | {"peak_device_bytes": peak_bytes()}


def _timed(pieces: Iterable[Any], prompt_tokens: int | None = None) -> Answers:
    """One request whose answer comes in pieces, a token each."""
    found, said = Answers(prompt_tokens=[] if prompt_tokens is None else [prompt_tokens]), []
    begin = before = time.perf_counter()
    for piece in pieces:
        now = time.perf_counter()
        (found.between if found.first else found.first).append(now - before)
        said.append(piece)
        before = now
    found.seconds, found.lengths = before - begin, [len(said)]
    found.outputs = [hashlib.sha256(str(said).encode()).hexdigest()[:12]]
    return found


def server(job: Job, case: Job) -> dict[str, Any]:
    """Anything that answers OpenAI's completions: times of streamed tokens, seen from outside."""
    workload, batch = case["workload"], case["batch"]
    if job["random_length"]:
        raise SystemExit(f"{job['peer']} is asked in text; random prompts are numbers.")
    ask = partial(stream, job["peer"], job["engine"].get("model", job["model"]), workload["max_tokens"])
    texts = [text for text, _ in job["prompts"]][: workload["warm_up"] + workload["requests"]]
    for text in texts[: workload["warm_up"]]:
        ask(text)
    found, measured = [], texts[workload["warm_up"] :]
    with ThreadPoolExecutor(batch) as pool:
        for first in range(0, len(measured) - batch + 1, batch):
            answers = list(pool.map(ask, measured[first : first + batch]))
            together = Answers(seconds=max(one.seconds for one in answers))
            for one, name in itertools.product(answers, ("first", "between", "lengths", "outputs")):
                getattr(together, name).extend(getattr(one, name))
            found.append(together)
    return summarise(found)


def stream(url: str, model: str, tokens: int, text: str) -> Answers:
    """One request, greedy; each chunk is taken for a token, as servers send them."""
    asked = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )

    def chunks() -> Iterable[str]:
        with urllib.request.urlopen(request, timeout=600) as response:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                choices = json.loads(data)["choices"] if data and data != "[DONE]" else []
                if choices and choices[0].get("text"):
                    yield choices[0]["text"]

    found = _timed(chunks())
    if not found.first:
        raise SystemExit(f"{url} has answered nothing.")
    return found


def llama_cpp(job: Job, case: Job) -> dict[str, Any]:
    """llama.cpp with experts of whole layers on the CPU (``-ncmoe``), as many as leave the device equal bytes."""
    folder, workload = Path(job["model"]), case["workload"]
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else [folder]
    if not files:
        raise SystemExit(f"{folder} has no .gguf file, which llama.cpp needs; convert the model and put it there.")
    layers = json.loads((files[0].parent / "config.json").read_text())["num_hidden_layers"]
    command = ["llama-bench", "-m", files[0], "-ncmoe", layers_on_cpu(case["budget"], layers), "-o", "json"]
    command += ["-p", _LLAMA_PROMPT, "-n", workload["max_tokens"], "-r", workload["requests"]]
    output = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
    return parsed(json.loads(output))


def layers_on_cpu(budget: str, layers: int) -> int:
    """Layers whose experts are not on the device, if the others are to have a share of all."""
    share = ExpertBudget.parse(budget).share
    if share is None:
        raise SystemExit(f"a budget of {budget} says nothing to llama.cpp; give it a share, such as 25%.")
    return layers - int(share * layers)


def parsed(tests: list[dict[str, Any]]) -> dict[str, Any]:
    """What ``llama-bench -o json`` says of a prompt and of an answer, in a row's words."""
    (prompt,) = [test for test in tests if test["n_prompt"] and not test["n_gen"]]
    (decode,) = [test for test in tests if test["n_gen"] and not test["n_prompt"]]
    steps = [nanoseconds / 1e9 / decode["n_gen"] for nanoseconds in decode["samples_ns"]]
    return {
        "ttft_ms": distribution([nanoseconds / 1e9 for nanoseconds in prompt["samples_ns"]]),
        "tpot_ms": distribution(steps),
        "decode_tokens_per_second": 1 / (sum(steps) / len(steps)),
        "prefill": None,
        "decode": None,
        "outputs": [],
        "prompt_tokens": [prompt["n_prompt"]],
    }


def answer(job: Job) -> None:
    serve = {"accelerate": accelerate, "llama.cpp": llama_cpp}.get(job["peer"], server)
    for case in job["cases"]:
        measured = {"peak_device_bytes": peak_bytes(), "warm_up_requests": case["workload"]["warm_up"]}
        measured |= serve(job, case)
        append_row(Path(job["out"]), {**case, "measured": measured})


if __name__ == "__main__":
    answer(json.loads(Path(sys.argv[1]).read_text()))
