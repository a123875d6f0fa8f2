"""transformers with accelerate: layers that have no place on the device are read again for every token."""

import hashlib
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_dymoe.bench.peers.common import answer_job
from vllm_dymoe.bench.prompts import random_tokens
from vllm_dymoe.bench.summary import Answers, peak_bytes, summarise


def _answer(job: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    workload = case["row"]["workload"]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        device_map: Any = "auto" if torch.cuda.is_available() else _layers_on_disk(job["model"])
        network = AutoModelForCausalLM.from_pretrained(
            job["model"], dtype="auto", device_map=device_map, offload_folder=folder
        )
        count = workload["warm_up"] + workload["requests"]
        if job["random_length"]:
            prompts = random_tokens(network.config.vocab_size, job["random_length"], count)
        else:
            tokenizer = AutoTokenizer.from_pretrained(job["model"])
            prompts = [tokenizer.encode(text) for text, _ in job["prompts"][:count]]
        found = [_one(network, ids, workload["max_tokens"]) for ids in prompts]
    return summarise(found[workload["warm_up"] :]) | {"peak_device_bytes": peak_bytes()}


def _layers_on_disk(model: str) -> dict[str, str]:
    """Without a GPU everything has room; its layers are put on disk, as those of a larger model would be."""
    from transformers import AutoConfig

    layers = AutoConfig.from_pretrained(model).num_hidden_layers
    kept = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), "cpu")
    return kept | {f"model.layers.{layer}": "disk" for layer in range(layers)}


def _one(network: Any, prompt: list[int], tokens: int) -> Answers:
    """Greedy, one request: batches of unequal prompts would need padding, which the others do not pay for."""
    past, found, answer = None, Answers(), []
    begin = before = time.perf_counter()
    given = torch.tensor([prompt], device=network.device)
    for _ in range(tokens):
        result = network(input_ids=given, past_key_values=past, use_cache=True)
        past, given = result.past_key_values, result.logits[:, -1:].argmax(-1)
        answer.append(int(given))
        now = time.perf_counter()
        (found.between if found.first else found.first).append(now - before)
        before = now
    found.seconds, found.prompt_tokens, found.lengths = before - begin, [len(prompt)], [tokens]
    found.outputs = [hashlib.sha256(str(answer).encode()).hexdigest()[:12]]
    return found


if __name__ == "__main__":
    answer_job(_answer)
