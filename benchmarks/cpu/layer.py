"""How close does a layer of experts on a CPU come to the limits of the machine?

The limits are those of memory and of the multipliers. The shape is Qwen3-30B-A3B's: 128 random experts [768, 2048], 8
per token, which together exceed the caches. The bound is the time that all threads take to read the bytes of the
experts in use, measured between the steps. llama.cpp (Q4_0, repacked) computes the layer at 4 bits in alternation; if
it is not installed (`pip install xllamacpp`), a message says so.

    python benchmarks/cpu/layer.py [--tokens 1 4 16 64 512] [--codes 4 2 8 4/2 mxfp4 nvfp4 fp8 16 e8 e8+e8] [--isa AVX2]
        [--activations 8] [--alone] [--busy]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable

import llama_cpp
import torch
from llama_cpp import LlamaCpp

from vllm_dymoe.cache.pages import map_bytes
from vllm_dymoe.experts.encoding import CODEBOOKS, LATTICES, encoding_of
from vllm_dymoe.experts.format import ExpertFormat, PackedExpert, stored_formats
from vllm_dymoe.kernels import Activation, CpuKernel
from vllm_dymoe.planner.plan import LayerPlan
from vllm_dymoe.planner.routing import group_by_expert
from vllm_dymoe.quantize.dummy import fill_randomly

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
BITS = {"4/2": 4, "mxfp4": 4, "nvfp4": 4, "fp8": 8, "e8": 2, "e8+e8": 4}
CODES = ("4", "2", "8", "4/2", "mxfp4", "nvfp4", "fp8", "16", "e8", "e8+e8")
clock: Callable[[], float] = time.perf_counter


def make_experts(encoding: str, group: int) -> tuple[list[PackedExpert], torch.Tensor]:
    """Return random experts and their bytes, uint8 [EXPERTS, bytes of one]."""

    def plain(bits: int) -> ExpertFormat:
        return ExpertFormat(
            HIDDEN, INTERMEDIATE, encoding_of(bits, (CODEBOOKS | LATTICES).get(encoding)), group, torch.bfloat16
        )

    bits = BITS.get(encoding) or int(encoding)
    fmt = stored_formats((4, 2), plain)[4] if encoding == "4/2" else plain(bits)
    arena = map_bytes(EXPERTS * fmt.whole_nbytes).view(EXPERTS, fmt.whole_nbytes)
    generator, experts = torch.Generator().manual_seed(0), []
    for packed in arena:
        expert = None
        for part, section in zip(fmt.slices, packed.split([part.nbytes for part in fmt.slices]), strict=True):
            for matrix, place in zip(part.matrices, part.sections, strict=True):
                fill_randomly(matrix, section[place], generator)
            expert = part.view(section, expert)
        experts.append(expert)
    return experts, arena


class Layer:
    """A layer in one encoding, with steps of random tokens."""

    def __init__(self, encoding: str, group: int, isa: str | None, activations: int = 16) -> None:
        self.experts, self.arena = make_experts(encoding, group)
        self.kernel = CpuKernel(isa=isa, activations=activations)
        self._generator = torch.Generator().manual_seed(1)

    def step(self, tokens: int) -> tuple[float, int]:
        """Return the seconds of a step of ``tokens`` tokens, and its number of experts."""
        ids = torch.rand(tokens, EXPERTS, generator=self._generator).topk(TOP_K, dim=1).indices
        x = torch.randn(tokens, HIDDEN, generator=self._generator).bfloat16()
        grouped = group_by_expert(ids.numpy())
        plan = LayerPlan.of_experts(grouped, [self.experts[expert] for expert in grouped.experts])
        out = x.new_empty(tokens * TOP_K, HIDDEN)
        begin = clock()
        self.kernel.begin(x, plan, out, Activation.SILU)
        self.kernel.compute(range(len(grouped.experts)))
        return clock() - begin, len(grouped.experts)

    def read(self, experts: int) -> float:
        """Return the seconds that all threads take to read ``experts`` adjacent experts."""
        first = int(torch.randint(EXPERTS - min(experts, EXPERTS) + 1, (), generator=self._generator))
        words = self.arena[first : first + experts].view(torch.int64).view(-1)
        begin = clock()
        words.sum()
        return clock() - begin


def main() -> None:
    """Print a row for each encoding and number of tokens, and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--codes", nargs="+", default=CODES, choices=CODES)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--isa", help="AMX, AVX512_BF16, AVX512, AVX2_VNNI, AVX2 or DEFAULT; by default the processor's best"
    )
    parser.add_argument("--activations", type=int, default=16, choices=(16, 8))
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--busy", action="store_true", help="one thread, by its processor time: others use the machine")
    options = parser.parse_args()
    if options.busy:
        global clock
        clock = llama_cpp.clock = time.thread_time
        torch.set_num_threads(1)
    threads, rows, peer = torch.get_num_threads(), [], None
    if not options.alone and "4" in options.codes:
        if library := llama_cpp.find():
            peer = LlamaCpp(library, (EXPERTS, TOP_K, HIDDEN, INTERMEDIATE), threads)
        print(f"{peer.name} beside it" if peer else "llama.cpp is not measured: pip install xllamacpp")
    for encoding in options.codes:
        layer = Layer(encoding, options.group, options.isa, options.activations)
        if encoding == options.codes[0]:
            best = min(layer.read(EXPERTS) for _ in range(10))
            print(f"{layer.kernel.name}; {threads} threads read {layer.arena.numel() / best / 1e9:.1f} GB/s at best")
            print(
                f"{'encoding':>6} {'tokens':>6} {'bound ms':>9} {'layer ms':>9} {'bound/layer':>11} {'GB/s':>6}   "
                f"peers, ms"
            )
        nbytes = layer.arena.shape[1]
        for tokens in options.tokens:
            steps, taken, others = max(8, options.steps // max(1, tokens // 8)), [], []
            for _ in range(steps):
                taken.append((*layer.step(tokens), layer.read(min(EXPERTS, tokens * TOP_K))))
                if peer is not None and encoding == "4":
                    others.append(peer.step(tokens))
            seconds, experts = statistics.median(t for t, _, _ in taken[2:]), statistics.mean(n for _, n, _ in taken)
            bound = statistics.median(r / min(EXPERTS, tokens * TOP_K) for _, _, r in taken) * experts
            rate = experts * nbytes / seconds / 1e9
            row, said = {"encoding": encoding, "tokens": tokens, "bound_ms": 1e3 * bound, "layer_ms": 1e3 * seconds}, ""
            if others:
                row["llama_cpp_ms"] = 1e3 * statistics.median(others[2:])
                said = f"   {row['llama_cpp_ms']:.3f} llama.cpp"
            rows.append(row)
            times = f"{1e3 * bound:9.3f} {1e3 * seconds:9.3f} {bound / seconds:11.2f} {rate:6.1f}"
            print(f"{encoding:>6} {tokens:>6} {times}{said}", flush=True)
    print(json.dumps({"kernel": layer.kernel.name, "threads": threads, "rows": rows}))


if __name__ == "__main__":
    main()
