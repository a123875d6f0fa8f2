"""How long does a token take from end to end, beside llama.cpp? Everything in memory, in turns.

A model with the layer shapes of Qwen3-30B-A3B (``benchmarks/budget/model.py``): experts of 4 bits and dense layers of 8
in both, ours with ``dense`` 8, llama.cpp with Q4_0 and Q8_0. A token's time is that of answers of many tokens less that
of answers of one, for each token more.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "budget")]
import model  # noqa: E402
from gguf_file import write_gguf  # noqa: E402

TOKENS, PROMPT, REPEATS, BATCHES = 24, 32, 5, (1, 16)
Generate = Callable[[list[list[int]], int], None]  # prompts of token ids, and how many tokens each answer has


def write(work: Path, layers: int) -> tuple[Path, Path]:
    """The checkpoint of 16 bits, and the same for llama.cpp."""
    from safetensors.torch import load_file

    folder, file = work / f"qwen3-{layers}-layers", work / f"qwen3-{layers}-layers.gguf"
    if not (folder / "config.json").exists():
        model.write(folder, layers)
    if not file.exists():
        tensors = {name: one for part in folder.glob("*.safetensors") for name, one in load_file(part).items()}
        config = json.loads((folder / "config.json").read_text())
        write_gguf(file.with_suffix(".partial"), tensors, config, "Q8_0")
        file.with_suffix(".partial").rename(file)
    return folder, file


def ours(folder: Path) -> Generate:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    options = {"expert_budget": "100%", "dense": 8}
    llm = LLM(str(folder), quantization="dymoe", additional_config={"dymoe": options}, skip_tokenizer_init=True,
              max_model_len=256, max_num_seqs=max(BATCHES), enable_prefix_caching=False)  # fmt: skip

    def generate(prompts: list[list[int]], tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], sampling, use_tqdm=False)

    return generate


def theirs(file: Path) -> Generate:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup = 256 * max(BATCHES), max(BATCHES), True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    params.n_gpu_layers, params.cache_ram_mib, params.verbosity = 0, 0, 0
    server, pool = xllamacpp.Server(params), ThreadPoolExecutor(max(BATCHES))
    fixed = {"temperature": 0, "ignore_eos": True, "cache_prompt": False}

    def generate(prompts: list[list[int]], tokens: int) -> None:
        asked = ({"prompt": ids, "n_predict": tokens, **fixed} for ids in prompts)
        for answer in pool.map(server.handle_completions, asked):
            assert answer["usage"]["completion_tokens"] == tokens, answer

    return generate


def seconds(generate: Generate, prompts: list[list[int]]) -> float:
    """Of a step in which every prompt's answer gains a token."""
    times = []
    for tokens in (1, TOKENS):
        begin = time.perf_counter()
        generate(prompts, tokens)
        times.append(time.perf_counter() - begin)
    return (times[1] - times[0]) / (TOKENS - 1)


def main() -> None:
    """Measure in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "dymoe-token", help="for models")
    options = parser.parse_args()
    folder, file = write(options.work, options.layers)
    both = ours(folder), theirs(file)
    print("| requests | dymoe, ms | llama.cpp, ms | dymoe / llama.cpp |\n| --- | --- | --- | --- |")
    for batch in BATCHES:
        prompts = [[(7 * n + 31 * k) % 9000 + 100 for k in range(PROMPT)] for n in range(batch)]
        for generate in both:
            generate(prompts, 2)
        found = zip(*([seconds(generate, prompts) for generate in both] for _ in range(REPEATS)), strict=True)
        mine, other = (statistics.median(times) for times in found)
        print(f"| {batch} | {1e3 * mine:.1f} | {1e3 * other:.1f} | {mine / other:.2f} |", flush=True)


if __name__ == "__main__":
    main()
