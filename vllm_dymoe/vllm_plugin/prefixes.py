"""Measures first tokens of cold and cached prompts in one engine.

This is the child process of ``vllm-dymoe bench --prefixes``. For each budget it measures in turns: a prompt that vLLM
has not seen, the same one, its first three quarters with another end, and an unseen one while other requests decode.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from vllm import LLM, SamplingParams

from vllm_dymoe.bench.prefixes import CASES, DECODING
from vllm_dymoe.bench.rows import append_row
from vllm_dymoe.vllm_plugin.measure import start

_TAIL = 4  # one of so many parts of a prompt is new where its prefix is cached
_SETTLE = 8  # tokens of the requests that decode, before a prompt comes
_ANSWER = 2  # tokens of an answer to a prompt


@dataclass
class _Clock:
    """Steps an engine, and notes when each request gets its tokens."""

    llm: LLM
    numbers: Any = field(default_factory=count)
    came: dict[str, list[float]] = field(default_factory=dict)  # moments of each running request's tokens
    unlike: int = 0  # prompts so far
    reused: dict[str, int] = field(default_factory=dict)  # cached tokens, by request, and by case of the last round

    def ask(self, ids: list[int], tokens: int) -> str:
        name = f"prefixes-{next(self.numbers)}"
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self.came[name] = []
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": ids}, sampling)
        return name

    def step_until(self, done: Callable[[], bool]) -> None:
        while not done():
            outputs, now = self.llm.llm_engine.step(), time.perf_counter()
            for output in outputs:
                if output.outputs[0].finish_reason == "error":
                    raise SystemExit(str(output.outputs[0].stop_reason))
                self.came[output.request_id].append(now)
                self.reused[output.request_id] = output.num_cached_tokens or 0

    def until_each_has(self, names: Sequence[str], tokens: int) -> None:
        self.step_until(lambda: all(len(self.came[name]) >= tokens for name in names))

    def first_token(self, ids: list[int], case: str) -> float:
        """Return the seconds to the first token of a prompt.

        The number of its tokens that were cached is noted under its case.
        """
        begin, name = time.perf_counter(), self.ask(ids, _ANSWER)
        self.step_until(lambda: len(self.came[name]) == _ANSWER)
        self.reused[case] = self.reused.pop(name)
        return self.came[name][0] - begin


def run(job: Mapping[str, Any]) -> None:
    """Measure a job's budgets and append a row for each."""
    llm = start(job)
    config = llm.llm_engine.vllm_config
    length = min(job["length"], config.model_config.max_model_len - _ANSWER - 1)
    words = [token for text in job["texts"] for token in llm.get_tokenizer().encode(text)]
    chunk = config.scheduler_config.max_num_batched_tokens
    for case in job["cases"]:
        llm.collective_rpc("dymoe_resize", args=(case["budget"],))
        clock = _Clock(llm)
        _rounds(clock, words, length, case["decoding"], 1)  # the cache fills up, and kernels are warm
        measured = _rounds(clock, words, length, case["decoding"], job["rounds"])
        reused = {name: clock.reused[name] for name in CASES}
        row = {**case, "kind": "prefixes", "length": length, "chunk": chunk, "measured": measured, "reused": reused}
        append_row(Path(job["out"]), row)


def _rounds(clock: _Clock, words: list[int], length: int, decoding: int, rounds: int) -> dict[str, float]:
    """Return the fewest seconds of each case in several rounds.

    The fewest count, because whatever else runs on a machine only adds to them.
    """
    found: dict[str, list[float]] = {name: [] for name in (*CASES, *DECODING)}

    def prompt(base: list[int] | None = None) -> list[int]:
        clock.unlike += 1
        head = base or []
        begin = 97 * clock.unlike % len(words)
        fresh = [words[clock.unlike % len(words)], *words[begin:], *words, *(words * (1 + length // len(words)))]
        return [*head, *fresh][:length]

    clock.llm.reset_prefix_cache()
    for _ in range(rounds):
        cold = prompt()
        found["cold"].append(clock.first_token(cold, "cold"))
        found["cached"].append(clock.first_token(cold, "cached"))
        found["new tail"].append(clock.first_token(prompt(cold[: length - length // _TAIL]), "new tail"))
        clock.llm.reset_prefix_cache()
        most = 16 * _SETTLE
        others = [clock.ask(prompt()[:_SETTLE], most) for _ in range(decoding)]
        clock.until_each_has(others, _SETTLE)
        before = len(clock.came[others[0]])
        found["beside decoding"].append(clock.first_token(prompt(), "beside decoding"))
        came = clock.came[others[0]]
        gaps = [later - earlier for earlier, later in pairwise(came)]
        found["a decode step"].append(median(gaps[1:before]))
        found["longest beside a prompt"].append(max(gaps[before - 1 :]))
        clock.llm.llm_engine.abort_request(others)
        clock.step_until(lambda: not clock.llm.llm_engine.has_unfinished_requests())
    return {name: min(seconds) for name, seconds in found.items() if seconds}


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()))
