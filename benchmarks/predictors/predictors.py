"""How accurate are predictors, by architecture and by number of training tokens?

Accuracy is measured for whole next layers and for single experts.

A trace of the shipped model is recorded through vLLM: greedy answers to pieces of its held-out texts, on which the
model was not trained. Some requests are held out; predictors are trained on the others, on all of them or on their
first tokens. Each architecture is trained as ``vllm-dymoe train`` does it and tested on the same held-out tokens,
together with the next layer's gate, which is free. With one thread and fixed seeds, the numbers are the same on the
same machine; other machines round sums differently, and greedy answers may diverge there.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES
from vllm_dymoe.prefetch.training import Recipe, split_by_request, train
from vllm_dymoe.trace.trace import Trace

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
RESULTS = Path(__file__).with_name("results.json")
_DOMAINS = "docs", "code", "arithmetic"
_PROMPTS, _CHARACTERS, _ANSWER = 150, 200, 128
_FEW_TOKENS = 1506  # of the previous recipe: 16 prompts
_HELD_OUT = 0.1


def write_prompts(path: Path, count: int) -> None:
    """Write pieces of the held-out texts, evenly spread, alternating between domains."""
    texts = [(MODEL / "heldout" / f"{domain}.txt").read_text() for domain in _DOMAINS]
    pieces = []
    for number in range(count):
        text = texts[number % len(texts)]
        at = number // len(texts) * (len(text) - _CHARACTERS) // -(-count // len(texts))
        pieces.append(json.dumps({"prompt": text[at : at + _CHARACTERS]}) + "\n")
    path.write_text("".join(pieces))


def recorded(work: Path) -> Trace:
    """Return the trace, recorded unless an earlier run did."""
    trace, prompts = work / "trace", work / "prompts.jsonl"
    if not trace.is_dir():
        work.mkdir(parents=True, exist_ok=True)
        write_prompts(prompts, _PROMPTS)
        command = [Path(sys.executable).with_name("vllm-dymoe"), "trace", MODEL, "--prompts", prompts, "--out", trace]
        command += ["--inputs", "--limit", "1GiB", "--max-tokens", _ANSWER]
        settings = {"max_model_len": 512, "enforce_eager": True, "gpu_memory_utilization": 0.3}
        subprocess.run([*map(str, command), "--engine", json.dumps(settings)], check=True)
    return Trace.load(trace)


def answers_of(trace: Trace) -> Trace:
    """Return the trace's decoded tokens, each once, by request."""
    trace = trace.select(trace.in_order())
    return trace.select(~trace.prefill)


def measure(trace: Trace, architectures: Sequence[str], epochs: int) -> Iterator[tuple[int, str, dict[str, float]]]:
    """Yield training tokens, architecture, and rates on held-out requests."""
    decoded, recipe = answers_of(trace), Recipe(epochs=epochs, held_out=_HELD_OUT)
    learnt, held_out = split_by_request(decoded, _HELD_OUT, recipe.seed)
    for tokens in (_FEW_TOKENS, int(learnt.sum())):
        used = held_out | (learnt & (learnt.cumsum(0) <= tokens))
        some, apart = decoded.select(used), held_out[used]
        for name in architectures:
            metrics = train(some, ARCHITECTURES[name], recipe, held_out=apart).metrics
            yield tokens, name, metrics["trained"]
        yield tokens, "next gate", metrics["next gate"]


def main() -> None:
    """Print each case, and write results.json, which docs/predictors.md quotes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(ARCHITECTURES), help="all if none")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-predictors", help="a trace")
    parser.add_argument("--epochs", type=int, default=20, help="at most, of what is trained by gradient descent")
    plan = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for tokens, name, rates in measure(recorded(plan.work.resolve()), plan.architectures, plan.epochs):
        print(
            f"{tokens:>6} tokens, {name:<13} whole layers {rates['all_k']:.1%}, experts {rates['accuracy']:.1%}",
            flush=True,
        )
        found.setdefault(str(tokens), {})[name] = {rate: round(value, 4) for rate, value in rates.items()}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
