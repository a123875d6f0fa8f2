"""Time per token of one request, compared with llama.cpp's, at 4 bits.

    pip install xllamacpp gguf
    python benchmarks/budget/beside_llama.py [--work /tmp/dymoe-budget] [--rounds 3]

The model is that of the budget benchmark; run `make bench-budget` first, which writes it. In each round, each side
starts a process and answers eight prompts. vllm-dymoe has all experts in memory and dense layers at 8 bits; llama.cpp
has Q4_0 experts and Q8_0 dense layers, repacked for the processor. It takes five minutes on a quiet machine, and 3 GB
of disk.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

PROMPT, TOKENS, REQUESTS, THREADS = 32, 33, 8, 2
SIDES, ANSWER = ("vllm-dymoe", "llama.cpp"), "seconds: "


def time_per_token(answer: Callable[[list[int], int], None], vocabulary: int) -> float:
    """Return the median seconds of a token, over eight prompts of random tokens.

    A prompt's first token is not counted.

    Args:
        answer: completes a prompt (token ids) with a number of tokens.
        vocabulary: number of token ids.
    """
    chance, found = random.Random(0), []
    for _ in range(REQUESTS + 1):  # the first one warms up
        prompt = [chance.randrange(vocabulary // 2) for _ in range(PROMPT)]
        seconds = []
        for tokens in (1, TOKENS):
            begun = time.perf_counter()
            answer(prompt, tokens)
            seconds.append(time.perf_counter() - begun)
        found.append((seconds[1] - seconds[0]) / (TOKENS - 1))
    return statistics.median(found[1:])


def dymoe(folder: Path, stores: Path) -> float:
    """Return vllm-dymoe's seconds per token."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(folder), quantization="dymoe", max_model_len=256, max_num_seqs=1, enable_prefix_caching=False,
        skip_tokenizer_init=True,
        additional_config={"dymoe": {"host_store": "pinned", "dense": 8, "store_dir": str(stores)}},
    )  # fmt: skip

    def answer(prompt: list[int], tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        (done,) = llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        assert len(done.outputs[0].token_ids) == tokens

    return time_per_token(answer, json.loads((folder / "config.json").read_text())["vocab_size"])


def llama(folder: Path, gguf: Path) -> float:
    """Return llama.cpp's seconds per token."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.warmup = 256, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
    params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, 0, 0
    server = xllamacpp.Server(params)
    fixed = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}

    def answer(prompt: list[int], tokens: int) -> None:
        done = server.handle_completions({"prompt": prompt, "n_predict": tokens, **fixed})
        assert done["usage"]["completion_tokens"] == tokens, done

    return time_per_token(answer, json.loads((folder / "config.json").read_text())["vocab_size"])


def write(folder: Path, gguf: Path) -> None:
    """Write the model for llama.cpp."""
    from gguf_file import write_gguf
    from safetensors.torch import load_file

    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    partial = gguf.with_suffix(".partial")
    write_gguf(partial, tensors, json.loads((folder / "config.json").read_text()), "Q8_0")
    partial.rename(gguf)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-budget")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.work / "qwen3-6-layers"
    gguf = arguments.work / "qwen3-6-layers.gguf"
    if not folder.is_dir():
        raise SystemExit(f"{folder} is missing: run `make bench-budget` first.")
    if arguments.side:
        seconds = dymoe(folder, arguments.work / "stores") if arguments.side == SIDES[0] else llama(folder, gguf)
        print(f"{ANSWER}{seconds}")
        return
    if not gguf.is_file():
        write(folder, gguf)
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(arguments.rounds):
        for side in SIDES[:: 1 if number % 2 else -1]:
            command = [sys.executable, __file__, "--work", str(arguments.work), "--side", side]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            (line,) = (line for line in said.splitlines() if line.startswith(ANSWER))  # vLLM logs there, too
            found[side].append(float(line.removeprefix(ANSWER)))
            print(f"{side}: {1e3 * found[side][-1]:.2f} ms a token", flush=True)
    ours, theirs = (statistics.median(found[side]) for side in SIDES)
    print(f"medians: {1e3 * ours:.2f} ms and {1e3 * theirs:.2f} ms, ratio {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
