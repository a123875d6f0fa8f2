"""What else serves a model, beside this plugin in the same table: vLLM itself, or any server, seen from outside.

``python -m`` this module answers the job of a server, which is named by its address: ``--peer http://localhost:8080``.
"""

import hashlib
import itertools
import json
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vllm_dymoe.bench.rows import append_row
from vllm_dymoe.bench.summary import Answers, peak_bytes, summarise

ENGINE = "vllm_dymoe.vllm_adapter.measure"


@dataclass(frozen=True)
class Peer:
    """How something else is measured."""

    module: str = "vllm_dymoe.bench.peers"  # the program that answers a job
    offloads: bool = False  # ``--cpu-offload-gb``: zero-copy from a GPU, of the experts that the budget leaves out


PEERS = {"vllm": Peer(ENGINE), "vllm-offload": Peer(ENGINE, offloads=True)}


def find_peer(name: str) -> Peer | None:
    """By name, or a server by its address; None if nothing of the name is known."""
    return Peer() if name.startswith(("http://", "https://")) else PEERS.get(name)


def server(job: Mapping[str, Any], case: Mapping[str, Any]) -> dict[str, Any]:
    """Anything that answers OpenAI's completions: times of streamed tokens."""
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

    def chunks() -> Iterator[str]:
        with urllib.request.urlopen(request, timeout=600) as response:
            for line in response:
                data = line.decode().removeprefix("data: ").strip()
                choices = json.loads(data)["choices"] if data and data != "[DONE]" else []
                if choices and choices[0].get("text"):
                    yield choices[0]["text"]

    said = []
    times = [time.perf_counter()]
    for piece in chunks():
        times.append(time.perf_counter())
        said.append(piece)
    if not said:
        raise SystemExit(f"{url} has answered nothing.")
    first, *between = (after - before for before, after in itertools.pairwise(times))
    output = hashlib.sha256(str(said).encode()).hexdigest()[:12]
    return Answers([first], between, times[-1] - times[0], lengths=[len(said)], outputs=[output])


def answer(job: Mapping[str, Any]) -> None:
    for case in job["cases"]:
        measured = {"peak_device_bytes": peak_bytes(), "warm_up_requests": case["workload"]["warm_up"]}
        append_row(Path(job["out"]), {**case, "measured": measured | server(job, case)})


if __name__ == "__main__":
    answer(json.loads(Path(sys.argv[1]).read_text()))
