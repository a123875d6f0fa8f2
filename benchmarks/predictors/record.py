"""Records what the shipped model's routers choose while it goes on from held-out texts, in a process of its own."""

import argparse
from pathlib import Path

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


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--requests", type=int, required=True, help="of each domain")
    parser.add_argument("--new-tokens", type=int, required=True)
    arguments = parser.parse_args()
    from vllm import LLM, SamplingParams

    # Traces are worth something for the precision that is served.
    options = {"hi": 4, "lo": 0, "expert_budget": "100%", "trace_inputs": True, "trace_limit": "1GiB"}
    llm = LLM(
        model=str(arguments.model),
        quantization="dymoe",
        additional_config={"dymoe": options | {"trace_dir": str(arguments.out)}},
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    found = pieces(arguments.model, arguments.requests)
    sampling = [
        SamplingParams(
            temperature=0.8,
            seed=number,
            max_tokens=arguments.new_tokens,
            ignore_eos=True,
            extra_args={"dymoe_domain": domain},
        )
        for number, (domain, _) in enumerate(found)
    ]
    llm.generate([{"prompt_token_ids": ids} for _, ids in found], sampling)
    print(llm.collective_rpc("dymoe_trace"), flush=True)


if __name__ == "__main__":
    main()
