"""DyMoE's observations: which experts a prompt can skip, and which layers suffer.

For Figure 3, experts are kept at 16 bits or skipped. They are chosen at random or by the heavy hitters that use them,
equally many in every layer or fewer in deeper ones (Eq. 4). For Figure 5, the weights of one layer are rounded to 2
bits; those of all others stay at 16.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_dymoe.experts.format import ExpertFormat, Projection
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies import POLICIES
from vllm_dymoe.policies.dymoe import CriticalHigh, Dymoe
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.packer import ExpertPacker
from vllm_dymoe.quantize.quantizers import quantize_matrix, round_to_nearest

RETENTIONS = (0.25, 0.5, 0.75, 0.9)
_HEAVY = 0.2  # share of heavy hitters, as in "dymoe-paper"


@dataclass(frozen=True)
class RandomHigh(CriticalHigh):
    """High precision for random experts, as many as a schedule says.

    The same tokens get the same experts.
    """

    planned: ClassVar[bool] = False

    def select(self, routing: Routing) -> Mapping[int, Precision]:
        active = sorted(routing.active)
        seed = zlib.crc32(routing.host_ids.tobytes() + bytes([routing.layer]))
        count = self.schedule.critical(routing.layer, routing.num_layers, len(active))
        high = set(np.random.default_rng(seed).permutation(active)[:count].tolist())
        return {expert: Precision.HIGH if expert in high else Precision.LOW for expert in active}


class AtRandom(Dymoe):
    """Keeps as many experts of a step as DyMoE would, but random ones."""

    name: ClassVar[str] = "random"
    summary: ClassVar[str] = "random experts, for comparison"

    @cached_property
    def precision(self) -> CriticalHigh:
        usual = super().precision
        return RandomHigh(usual.precisions, reuses_high=usual.reuses_high, schedule=usual.schedule)


def pruned() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield place and options of each row of Figure 3."""
    POLICIES[AtRandom.name] = AtRandom
    kinds = {"random": ("random", {}), "heavy hitters": ("dymoe", {"heavy_share": _HEAVY})}
    for retention in RETENTIONS:
        for chosen, (policy, more) in kinds.items():
            for layers in ("equal", "depth"):
                given = {"retention": retention, "high_by": layers, "reuse_high": False, **more}
                place = {"retention": retention, "kept": chosen, "layers": layers}
                yield place, {"high": 16, "low": 0, "policy": policy, "policy_options": given}


def put_rounded(packer: ExpertPacker, checkpoint: Checkpoint, rounded: int, fmt: ExpertFormat) -> None:
    """Write all weights; those of layer ``rounded`` are first rounded to a format."""
    section = torch.empty(fmt.nbytes, dtype=torch.uint8)
    for layer in range(len(packer.experts.layers)):
        for expert in range(packer.experts.num_experts):
            matrices = checkpoint.expert(layer, expert)
            for projection in Projection:
                weight, form = matrices[projection][0], fmt.matrices[projection]
                assert isinstance(weight, Tensor)
                if layer == rounded:
                    some = section[: form.nbytes]
                    quantize_matrix(weight.float(), form, round_to_nearest, some)
                    weight = dequantize(form.view(some))
                packer.put(layer, expert, projection, weight)
