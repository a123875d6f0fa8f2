"""How near one layer's experts on a CPU come to what the machine's memory and its multipliers allow.

Qwen3-30B-A3B's shape: 128 experts [768, 2048], 8 for each token, random ones of more bytes than caches hold. The bound
is the time that all threads take to read the bytes of the experts in use, measured between the rows. ``--torch-int4``
adds torch's own kernel for 4 bits, where it runs.

    python benchmarks/cpu/layer.py [--tokens 1 4 16 64 512] [--codes 4 2 8 4/2 mxfp4 nvfp4 fp8 16 e8 e8+e8] [--isa AVX2]
"""

import argparse
import json
import statistics
import time

import torch

from vllm_dymoe.host_memory import map_bytes
from vllm_dymoe.kernels import Activation, CpuKernel
from vllm_dymoe.quantize.dummy import fill_randomly
from vllm_dymoe.residency.code import CODEBOOKS, LATTICES, code_of
from vllm_dymoe.residency.decision import Decision
from vllm_dymoe.residency.format import Expert, Format, stored_formats
from vllm_dymoe.residency.routing import group_by_expert

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768
BITS = {"4/2": 4, "mxfp4": 4, "nvfp4": 4, "fp8": 8, "e8": 2, "e8+e8": 4}
CODES = ("4", "2", "8", "4/2", "mxfp4", "nvfp4", "fp8", "16", "e8", "e8+e8")


def make_experts(code: str, group: int) -> tuple[list[Expert], torch.Tensor]:
    """Random experts and their bytes, uint8 [EXPERTS, bytes of one]."""

    def plain(bits: int) -> Format:
        return Format(HIDDEN, INTERMEDIATE, code_of(bits, (CODEBOOKS | LATTICES).get(code)), group, torch.bfloat16)

    bits = BITS.get(code) or int(code)
    fmt = stored_formats((4, 2), plain)[4] if code == "4/2" else plain(bits)
    arena = map_bytes(EXPERTS * fmt.whole_nbytes).view(EXPERTS, fmt.whole_nbytes)
    generator, experts = torch.Generator().manual_seed(0), []
    for blob in arena:
        expert = None
        for part, section in zip(fmt.slices, blob.split([part.nbytes for part in fmt.slices]), strict=True):
            for matrix, place in zip(part.matrices, part.sections, strict=True):
                fill_randomly(matrix, section[place], generator)
            expert = part.view(section, expert)
        experts.append(expert)
    return experts, arena


class Layer:
    """One code's layer, and steps of random tokens over it."""

    def __init__(self, code: str, group: int, isa: str | None) -> None:
        self.experts, self.arena = make_experts(code, group)
        self.kernel = CpuKernel(isa=isa)
        self._generator = torch.Generator().manual_seed(1)

    def step(self, tokens: int) -> tuple[float, int]:
        """Seconds of a step of so many tokens, and how many experts it had."""
        ids = torch.rand(tokens, EXPERTS, generator=self._generator).topk(TOP_K, dim=1).indices
        x = torch.randn(tokens, HIDDEN, generator=self._generator).bfloat16()
        grouped = group_by_expert(ids.numpy())
        decision = Decision.of_routing(grouped, grouped.experts)
        for item, expert in enumerate(grouped.experts):
            decision.place(item, self.experts[expert])
        out = x.new_empty(tokens * TOP_K, HIDDEN)
        begin = time.perf_counter()
        self.kernel.begin(x, decision, out, Activation.SILU)
        self.kernel.compute(range(len(grouped.experts)))
        return time.perf_counter() - begin, len(grouped.experts)

    def read(self, experts: int) -> float:
        """Seconds that all threads take to read so many experts, which lie behind one another."""
        first = int(torch.randint(EXPERTS - min(experts, EXPERTS) + 1, (), generator=self._generator))
        words = self.arena[first : first + experts].view(torch.int64).view(-1)
        begin = time.perf_counter()
        words.sum()
        return time.perf_counter() - begin


def torch_int4(tokens: int, steps: int) -> float | None:
    """Median seconds of the same layer by torch's ``_weight_int4pack_mm_for_cpu``; None where that does not run."""
    pack, multiply = torch.ops.aten._convert_weight_to_int4pack_for_cpu, torch.ops.aten._weight_int4pack_mm_for_cpu
    shapes = (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)
    x, rows, taken = torch.randn(tokens, HIDDEN).bfloat16(), max(1, tokens * TOP_K // EXPERTS), []
    try:
        weights = []
        for _ in range(32):
            codes = [torch.randint(16, shape, dtype=torch.int32) for shape in shapes]
            weights.append([(pack(c, 1), torch.rand(c.shape[1] // 64, c.shape[0], 2).bfloat16()) for c in codes])
        for step in range(steps):
            begin = time.perf_counter()
            for expert in range(min(tokens * TOP_K, EXPERTS)):
                (up, of_up), (down, of_down) = weights[(step * TOP_K + expert) % 32]
                hidden = multiply(x[:rows], up, 64, of_up)
                hidden = torch.nn.functional.silu(hidden[:, :INTERMEDIATE]) * hidden[:, INTERMEDIATE:]
                multiply(hidden, down, 64, of_down)
            taken.append(time.perf_counter() - begin)
    except (RuntimeError, NotImplementedError):
        return None
    return statistics.median(taken)


def main() -> None:
    """Print a row for each code and number of tokens, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--codes", nargs="+", default=CODES, choices=CODES)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--isa", help="AVX512, AVX2 or DEFAULT; the processor's best if left out")
    parser.add_argument("--torch-int4", action="store_true")
    options = parser.parse_args()
    rows = []
    print(f"{'code':>6} {'tokens':>6} {'bound ms':>9} {'layer ms':>9} {'bound/layer':>11} {'GB/s':>6}")
    for code in options.codes:
        layer = Layer(code, options.group, options.isa)
        nbytes = layer.arena.shape[1]
        for tokens in options.tokens:
            steps = max(8, options.steps // max(1, tokens // 8))
            taken = [(*layer.step(tokens), layer.read(min(EXPERTS, tokens * TOP_K))) for _ in range(steps)][2:]
            seconds, experts = statistics.median(t for t, _, _ in taken), statistics.mean(n for _, n, _ in taken)
            bound = statistics.median(r / min(EXPERTS, tokens * TOP_K) for _, _, r in taken) * experts
            rate = experts * nbytes / seconds / 1e9
            rows.append({"code": code, "tokens": tokens, "bound_ms": 1e3 * bound, "layer_ms": 1e3 * seconds})
            print(f"{code:>6} {tokens:>6} {1e3 * bound:9.3f} {1e3 * seconds:9.3f} {bound / seconds:11.2f} {rate:6.1f}")
            if options.torch_int4 and code == "4":
                other = torch_int4(tokens, steps)
                rows[-1]["torch_int4_ms"] = None if other is None else 1e3 * other
                print(f"{'torch int4':>23}: {'does not run here' if other is None else f'{1e3 * other:.3f} ms'}")
    print(json.dumps({"kernel": layer.kernel.name, "threads": torch.get_num_threads(), "rows": rows}))


if __name__ == "__main__":
    main()
