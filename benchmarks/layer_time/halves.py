"""What does the second address cost a resident expert on this CPU? Codes of 4 bits in halves, and in one section.

Two sets of experts with the same codes go through the CPU's kernel in turns, and must give the same bits. Both are
larger than the caches, as a layer's experts are. The last lines are of the shipped model's experts, which share one
compiled call. Prints medians of both and of their ratio; the aim is a ratio below 1.05.
"""

import argparse
import json
import statistics
import time
from dataclasses import replace

import torch

from vllm_dymoe.kernels import Activation, CpuKernel, compute_experts, pack, unpack
from vllm_dymoe.kernels.base import ExpertWork
from vllm_dymoe.residency.code import code_of
from vllm_dymoe.residency.format import Expert, Format

SHAPES = {"2048 x 768": (2048, 768, 8), "2048 x 1408": (2048, 1408, 6), "256 x 64": (256, 64, 4)}
TOKENS = (1, 2, 4, 16)
BYTES = 64 << 20


def make_pair(hidden: int, intermediate: int) -> tuple[Expert, Expert]:
    """An expert of random codes in one section, and in two halves."""
    form = Format(hidden, intermediate, code_of(4), 64, torch.bfloat16, nested=True)
    base = torch.randint(0, 256, (form.base.nbytes,), dtype=torch.uint8)
    for matrix in form.base.view(base):
        matrix.scales_zeros.normal_().mul_(0.01)
    halves = form.view(torch.randint(0, 256, (form.nbytes,), dtype=torch.uint8), form.base.view(base))
    plain = replace(form, nested=False)
    whole = plain.view(torch.empty(plain.nbytes, dtype=torch.uint8))
    for source, target in zip(halves, whole, strict=True):
        scales, zeros = source.scales_zeros.permute(2, 1, 0)
        section = torch.empty(target.format.nbytes, dtype=torch.uint8)
        pack(target.format, unpack(source), scales, zeros, section)
        target.weight.copy_(target.format.view(section).weight)
        target.scales_zeros.copy_(source.scales_zeros)
    return whole, halves


def measure(hidden: int, intermediate: int, top_k: int, tokens: int, rounds: int) -> dict[str, float]:
    """Medians over rounds, in microseconds for each expert.

    Raises:
        SystemExit: the two do not give the same bits.
    """
    kernel = CpuKernel()
    one = make_pair(hidden, intermediate)
    count = max(2 * top_k, min(40 * top_k, BYTES // (6 * hidden * intermediate // 4)) // top_k * top_k)
    pairs = [one, *(make_pair(hidden, intermediate) for _ in range(count - 1))]
    x, rows = torch.randn(tokens, hidden).bfloat16(), torch.arange(tokens)
    outs = [torch.empty(tokens * top_k, hidden, dtype=torch.bfloat16) for _ in range(2)]
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        first = turn * top_k % count
        for which in (0, 1) if turn % 2 else (1, 0):
            experts = [pair[which] for pair in pairs[first : first + top_k]]
            work = [ExpertWork(*expert, rows, rows + tokens * place) for place, expert in enumerate(experts)]
            begin = time.perf_counter()
            compute_experts(kernel, x, work, outs[which], Activation.SILU)
            seconds[which].append((time.perf_counter() - begin) / top_k)
        if not torch.equal(*outs):
            raise SystemExit("halves give other bits than whole codes; nothing reported")
    plain, halves = (1e6 * statistics.median(found) for found in seconds)
    ratio = statistics.median(two / one for one, two in zip(*seconds, strict=True))
    return {"plain_us": round(plain, 1), "halves_us": round(halves, 1), "ratio": round(ratio, 3)}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's threads")
    parser.add_argument("--rounds", type=int, default=121, help="of each case")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cases = {}
    with torch.inference_mode():
        for name, (hidden, intermediate, top_k) in SHAPES.items():
            for tokens in TOKENS:
                case = measure(hidden, intermediate, top_k, tokens, arguments.rounds)
                cases[f"{name}, {tokens} tokens"] = case
                print(f"{name}, {tokens:2} tokens: " + ", ".join(f"{key} {value}" for key, value in case.items()))
    print(json.dumps({"threads": arguments.threads, "cases": cases}))


if __name__ == "__main__":
    main()
