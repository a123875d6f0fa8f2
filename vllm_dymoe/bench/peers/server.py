"""Anything that answers OpenAI's completions: times of streamed tokens, seen from outside."""

import hashlib
import json
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from vllm_dymoe.bench.peers.common import answer_job
from vllm_dymoe.bench.summary import Answers, summarise


def _answer(job: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    workload, batch = case["row"]["workload"], case["batch"]
    if job["random_length"]:
        raise SystemExit(f"{job['peer']} is asked in text; random prompts are numbers.")
    ask = partial(stream, job["peer"], job["engine"].get("model", job["model"]), workload["max_tokens"])
    texts = [text for text, _ in job["prompts"]][: workload["warm_up"] + workload["requests"]]
    for text in texts[: workload["warm_up"]]:
        ask(text)
    found = []
    measured = texts[workload["warm_up"] :]
    with ThreadPoolExecutor(batch) as pool:
        for first in range(0, len(measured) - batch + 1, batch):
            found.append(_together(list(pool.map(ask, measured[first : first + batch]))))
    return summarise(found)


def stream(url: str, model: str, tokens: int, text: str) -> Answers:
    """One request, greedy; each chunk is taken for a token, as servers send them."""
    asked = {"model": model, "prompt": text, "max_tokens": tokens, "temperature": 0, "stream": True}
    request = urllib.request.Request(
        url.rstrip("/") + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    found, said = Answers(), ""
    begin = before = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)["choices"]
            if not chunk or not chunk[0].get("text"):
                continue
            said += chunk[0]["text"]
            now = time.perf_counter()
            (found.between if found.first else found.first).append(now - before)
            before = now
    if not found.first:
        raise SystemExit(f"{url} has answered nothing.")
    found.seconds, found.lengths = before - begin, [1 + len(found.between)]
    found.outputs = [hashlib.sha256(said.encode()).hexdigest()[:12]]
    return found


def _together(answers: list[Answers]) -> Answers:
    """Requests that were sent at once, as one group."""
    return Answers(
        first=[value for one in answers for value in one.first],
        between=[value for one in answers for value in one.between],
        seconds=max(one.seconds for one in answers),
        lengths=[one.lengths[0] for one in answers],
        outputs=[one.outputs[0] for one in answers],
    )


if __name__ == "__main__":
    answer_job(_answer)
