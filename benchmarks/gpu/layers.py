"""The layers that are measured, and the hardware's best possible times.

No GPU is needed.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts

TOKENS = (1, 4, 16, 64, 512, 4096)
PRECISIONS: dict[str, tuple[int, ...]] = {"16": (16,), "8": (8,), "4": (4,), "2": (2,), "4/2": (4, 2)}
"""Bits of the experts, in turn."""
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """Sizes of MoE layers that are all the same."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int = 1
    group: int = 64
    name: str = ""

    def format(self, bits: int) -> ExpertFormat:
        """Return the byte layout of a packed expert."""
        return ExpertFormat(self.hidden, self.intermediate, encoding_of(bits), self.group, DTYPE)

    def at(self, bits: Sequence[int]) -> ModelExperts:
        """Return its experts, stored at these bit-widths."""
        return ModelExperts(tuple(range(self.layers)), self.experts, self.top_k, {b: self.format(b) for b in bits})


LAYERS = (
    Model(4096, 14336, 8, 2, name="Mixtral-8x7B"),
    Model(2048, 768, 128, 8, name="Qwen3-30B-A3B"),
    Model(2048, 1024, 64, 8, name="OLMoE-1B-7B"),
    Model(2048, 1408, 64, 6, name="DeepSeek-V2-Lite"),
    Model(2048, 1408, 60, 4, name="Qwen1.5-MoE"),
)
"""One layer of each model, from its config.json on Hugging Face."""


@dataclass(frozen=True)
class Machine:
    """Rates of the card, measured before anything else."""

    name: str  # of the card
    copy_bytes_per_second: float  # read and written bytes of a large copy on the device
    flops_per_second: float  # of a large dense bf16 product
    host_bytes_per_second: float  # of a large copy from pinned host memory


@dataclass(frozen=True)
class Work:
    """Bytes and operations of one step of a layer."""

    weight_bytes: int  # of all active experts, read once
    other_bytes: int  # inputs, inner activations (written and read) and outputs
    flops: int  # two for each weight and token

    def seconds(self, machine: Machine) -> float:
        """Return the bound: the longer of the times for moving and for computing."""
        moving = (self.weight_bytes + self.other_bytes) / machine.copy_bytes_per_second
        return max(moving, self.flops / machine.flops_per_second)


def route(layer: Model, tokens: int, seed: int = 0) -> list[list[int]]:
    """Return the experts of each token, uniformly random.

    This is the worst case for few tokens.
    """
    generator = random.Random(seed)
    return [sorted(generator.sample(range(layer.experts), layer.top_k)) for _ in range(tokens)]


def work_of(layer: Model, routing: list[list[int]], bits: tuple[int, ...]) -> Work:
    """Return the work of a step; expert e has bits[e % len(bits)]."""
    active = {expert for row in routing for expert in row}
    pairs = sum(len(row) for row in routing)
    weights = sum(layer.format(bits[expert % len(bits)]).nbytes for expert in active)
    others = 2 * len(routing) * layer.hidden + pairs * (4 * layer.intermediate + 2 * layer.hidden)
    return Work(weights, others, 6 * pairs * layer.hidden * layer.intermediate)
