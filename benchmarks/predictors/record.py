"""Records what a model's routers choose while it goes on from prompts, in a process of its own.

The shipped model gets held-out texts of three domains. A model of random weights, which has no tokenizer, gets random
tokens: to it they are as good as any.
"""

import argparse
import random
from pathlib import Path
from typing import Any

DOMAINS = ("arithmetic", "code", "docs")
PROMPT = 32  # tokens


def pieces(model: Path, requests: int, shift: float = 0) -> list[tuple[str, list[int]]]:
    """Prompts of equal length from all over each domain's held-out text, the domains in turn.

    Args:
        model: folder of the shipped model.
        requests: of each domain.
        shift: where the first one begins, as a share of the way to the second.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    found = []
    for domain in DOMAINS:
        ids = tokenizer((model / "heldout" / f"{domain}.txt").read_text())["input_ids"]
        step = (len(ids) - PROMPT) // requests
        starts = [int((place + shift) * step) for place in range(requests)]
        found.append([(domain, ids[start : start + PROMPT]) for start in starts])
    return [piece for together in zip(*found, strict=True) for piece in together]


def random_pieces(vocabulary: int, requests: int) -> list[tuple[str, list[int]]]:
    """Prompts of random tokens, without a domain."""
    chosen = random.Random(0)
    return [("", chosen.choices(range(2, vocabulary), k=PROMPT)) for _ in range(requests)]


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, required=True, help="of each domain")
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--random", type=int, metavar="VOCABULARY", help="prompts are so many different random tokens")
    arguments = parser.parse_args()
    from vllm import LLM, SamplingParams

    # Traces are worth something for the precision that is served.
    trace = {"folder": str(arguments.out), "limit": "1GiB", "inputs": True}
    options = {"hi": 4, "lo": 0, "expert_budget": "100%"}
    settings: dict[str, Any] = {"skip_tokenizer_init": True} if arguments.random else {}
    llm = LLM(
        model=str(arguments.model),
        quantization="dymoe",
        additional_config={"dymoe": options | {"trace": trace}},
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=32,
        enable_prefix_caching=False,
        **settings,
    )
    if arguments.random:
        found = random_pieces(arguments.random, arguments.requests)
    else:
        found = pieces(arguments.model, arguments.requests)
    sampling = [
        SamplingParams(
            temperature=0.8,
            seed=number,
            max_tokens=arguments.new_tokens,
            ignore_eos=True,
            detokenize=not arguments.random,
            extra_args={"dymoe_domain": domain} if domain else None,
        )
        for number, (domain, _) in enumerate(found)
    ]
    llm.generate([{"prompt_token_ids": ids} for _, ids in found], sampling)
    print(llm.collective_rpc("dymoe_trace"), flush=True)


if __name__ == "__main__":
    main()
