"""llama.cpp with experts of whole layers on the CPU (``-ncmoe``), as many as leave the device equal bytes."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_dymoe.bench.peers.common import answer_job
from vllm_dymoe.bench.summary import distribution
from vllm_dymoe.config import ExpertBudget

_PROMPT = 64  # tokens: llama-bench makes them up


def layers_on_cpu(budget: str, layers: int) -> int:
    """Layers whose experts are not on the device, if the others are to have a share of all."""
    share = ExpertBudget.parse(budget).share
    if share is None:
        raise SystemExit(f"a budget of {budget} says nothing to llama.cpp; give it a share, such as 25%.")
    return layers - int(share * layers)


def _answer(job: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    folder, workload = Path(job["model"]), case["row"]["workload"]
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else [folder]
    if not files:
        raise SystemExit(f"{folder} has no .gguf file, which llama.cpp needs; convert the model and put it there.")
    layers = json.loads((files[0].parent / "config.json").read_text())["num_hidden_layers"]
    command = ["llama-bench", "-m", files[0], "-ncmoe", layers_on_cpu(case["budget"], layers), "-o", "json"]
    command += ["-p", _PROMPT, "-n", workload["max_tokens"], "-r", workload["requests"]]
    output = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout
    return parsed(json.loads(output), case["batch"])


def parsed(tests: list[dict[str, Any]], batch: int) -> dict[str, Any]:
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


if __name__ == "__main__":
    answer_job(_answer)
