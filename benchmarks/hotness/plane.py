"""What does it cost a step that versions follow traffic? One engine, with and without the plane in turn.

A pair is one block of steps with the plane, and one without it: rows stay as they are, and nobody counts, plans or
moves. Which comes first changes from pair to pair. Before steps without it, copies that are on their way may land.
"""

import json
import random
import statistics
import sys
import time
from typing import Any

import numpy as np
from texts import DOMAINS, MODEL, pieces
from vllm import LLM, SamplingParams

from vllm_dymoe.residency.hotness import Hotness, Rule, even_shares, hottest, swaps

BLOCK, PROMPT, ANSWER = 4, 48, 448  # steps; tokens
SECONDS = 20.0
LAYERS, EXPERTS = 48, 128  # Qwen3-30B-A3B, for the time of a plan
# Nobody is ever so much hotter that a move pays; or nearly everybody is, in short windows.
STILL, MOVING = {"margin": 1e9}, {"margin": 0, "slack": 0, "window_s": 0.5, "window_uses": 1, "alpha": 1.0}


class Plane:
    """Switches the plane of a runtime, and takes the time that it spends."""

    def __init__(self, runtime: Any) -> None:
        self._runtime, self._migration = runtime, runtime.serving.migration
        self.seconds = 0.0
        for name in ("turn", "count"):
            setattr(self._migration, name, self._timed(getattr(self._migration, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*arguments: Any) -> None:
            begin = time.perf_counter()
            function(*arguments)
            self.seconds += time.perf_counter() - begin

        return timed

    def switch(self, *, on: bool) -> None:
        """For the next step on."""
        if not on:
            for fetch in self._migration.flying:
                self._runtime.engine.wait(fetch.ticket)
        self._runtime.serving.migration = self._migration if on else None


def measure(llm: LLM, batch: int) -> dict[str, Any]:
    """Pairs of blocks until the time is over."""
    runtime = llm.llm_engine.vllm_config.quant_config.loaded_model().runtime
    plane, ratios, steps, inside, on_seconds = Plane(runtime), [], [], 0.0, 0.0
    texts = {domain: pieces(domain, llm.get_tokenizer(), PROMPT) for domain in DOMAINS}
    begun, number = time.perf_counter(), 0
    runtime.reset_stats()
    while time.perf_counter() - begun < SECONDS:
        for place in range(batch):
            rows = texts[DOMAINS[place % len(DOMAINS)]]
            sampling = SamplingParams(temperature=1, seed=number, max_tokens=ANSWER, ignore_eos=True, detokenize=False)
            llm.llm_engine.add_request(str(number), {"prompt_token_ids": rows[number % len(rows)]}, sampling)
            number += 1
        llm.llm_engine.step()
        for pair in range((ANSWER - 1) // (2 * BLOCK)):
            seconds = {}
            for on in (True, False) if pair % 2 else (False, True):
                plane.switch(on=on)
                before = plane.seconds
                begin = time.perf_counter()
                for _ in range(BLOCK):
                    llm.llm_engine.step()
                seconds[on] = time.perf_counter() - begin
                inside += plane.seconds - before
            ratios.append(seconds[True] / seconds[False] - 1)
            on_seconds += seconds[True]
            steps.append(seconds[False] / BLOCK)
        plane.switch(on=True)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    stats = runtime.stats()
    assert stats.misses == 0
    runtime.check_integrity()
    low, high = interval(ratios)
    return {
        "batch": batch,
        "pairs": len(ratios),
        "step_ms": 1e3 * statistics.median(steps),
        "paired_share": statistics.median(ratios),
        "paired_share_low": low,
        "paired_share_high": high,
        "host_share": inside / on_seconds,
        "moves": stats.moves,
        "windows": stats.windows,
        "link_share": stats.migration_link_seconds / on_seconds,
    }


def interval(values: list[float]) -> tuple[float, float]:
    """Where the median of as many is in 95 of 100 cases, by drawing again from those that there are."""
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[974]


def plan_seconds() -> float:
    """The end of one window at the size of a real model, a quarter of the experts high, behind a shift."""
    chance = np.random.default_rng(0)
    counts = chance.geometric(0.02, (2, LAYERS, EXPERTS))
    places, rule = np.full(LAYERS, EXPERTS // 4), Rule(0.5, 0.2, 1)
    hotness, high = Hotness.of(counts[0]), hottest(even_shares(counts[0]), places)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        swaps(hotness.after(counts[1], rule), high, places, rule)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Measure one case."""
    job = json.loads(sys.argv[1])
    options = {
        "hi": 4, "lo": 2, "system": "dynaexq", "expert_budget": job["budget"], "link_gbps": job["link_gbps"],
        "system_options": MOVING if job["moves"] else STILL,
    }  # fmt: skip
    llm = LLM(
        model=str(MODEL), quantization="dymoe", additional_config={"dymoe": options}, enforce_eager=True,
        max_model_len=512, max_num_seqs=job["batch"], enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    print(json.dumps({"moving": job["moves"], **measure(llm, job["batch"]), "plan_ms": 1e3 * plan_seconds()}))


if __name__ == "__main__":
    main()
