"""How checkpoints name their experts, and how projections share a tensor.

There is a tensor for each projection of each expert (``layers.3.mlp.experts.7.gate_proj``, Mixtral's ``w1``, ``w3``,
``w2``), or one for all experts of a layer, a stack: ``experts.gate_up_proj`` [E, 2 I, H] and ``experts.down_proj`` [E,
H, I]; Granite's are named ``input_linear`` and ``output_linear``. Stacks of GPT-OSS, Llama 4 and Qwen3-VL-MoE are
transposed, [E, H, 2 I] and [E, I, H], which is inferred from their shapes; in GPT-OSS rows of gate and up alternate. A
bias is a separate tensor, without the columns. The names of quantized stacks end with that of a part, as in
``gate_up_proj_blocks``, and the stacks are not transposed.
"""

import re
from dataclasses import dataclass

from torch import Tensor

from vllm_dymoe.experts.format import Projection

# Layers of drafts (multi-token prediction), and of Qwen3-Omni's second model, which vLLM serves separately.
_OTHER_MODELS = frozenset(("mtp", "talker"))
_NAME = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<layer>\d+)\.(?:[^.]+\.)*experts\.(?P<rest>.+)")
_GRANITE = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<layer>\d+)\.block_sparse_moe\.(?P<rest>\w+_linear)\.weight")
_GATE, _UP, _DOWN = (Projection.GATE,), (Projection.UP,), (Projection.DOWN,)
_SEPARATE = {"gate_proj": _GATE, "up_proj": _UP, "down_proj": _DOWN, "w1": _GATE, "w3": _UP, "w2": _DOWN}
_STACKED = {
    "gate_up_proj": (Projection.GATE, Projection.UP),
    "input_linear": (Projection.GATE, Projection.UP),
    "down_proj": _DOWN,
    "output_linear": _DOWN,
}
_ROUTERS = "e_score_correction_bias"  # Laguna stores it next to the experts
_STACK_PARTS = {"scale_inv": "weight_scale_inv", "scale": "weight_scale"}  # of a weight whose name has no ".weight"


@dataclass(frozen=True)
class ExpertName:
    """The parts of an expert tensor's name."""

    layers: str  # name of its list of layers, ``model.layers``
    layer: int  # index of the layer in the model
    expert: int | None  # None for a stack of all the layer's experts
    projections: tuple[Projection, ...]  # projections in its rows; empty if the rest of the name is unknown
    part: str  # "weight", "bias", or another ending ("qweight" in quantized checkpoints)

    @property
    def of_model(self) -> bool:
        """Whether the layers are the model's own, not a draft's or another model's."""
        return _OTHER_MODELS.isdisjoint(self.layers.split("."))


def read_name(name: str) -> ExpertName | None:
    match = _NAME.fullmatch(name) or _GRANITE.fullmatch(name)
    if match is None or match["rest"] == _ROUTERS:
        return None
    layers, layer, rest = match["stack"], int(match["layer"]), match["rest"]
    number, _, tail = rest.partition(".")
    if number.isdecimal():
        matrix, _, part = tail.partition(".")
        return ExpertName(layers, layer, int(number), _SEPARATE.get(matrix, ()), part)
    for matrix, projections in _STACKED.items():
        if rest.startswith(matrix):
            part = rest[len(matrix) :].lstrip("_.") or "weight"
            return ExpertName(layers, layer, None, projections, _STACK_PARTS.get(part, part))
    return ExpertName(layers, layer, None, (), "weight")


@dataclass(frozen=True)
class Stacking:
    """Layout of a stack's matrices.

    Columns come first or not; rows of gate and up alternate, or one follows the other.
    """

    transposed: bool = False
    interleaved: bool = False

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that a matrix, or a bias, has in a stack.

        ``matrix`` is [rows, columns], or [rows].
        """
        return matrix[::-1] if self.transposed else matrix

    def split(self, matrix: Tensor, projections: tuple[Projection, ...]) -> tuple[Tensor, ...]:
        """Return views of one expert's part of a stack, for each projection.

        Views are [rows, columns], or [rows] for a bias.
        """
        rows = matrix.t() if self.transposed else matrix  # t() does not change a bias
        return tuple(rows[part] for part in self.rows(rows.shape[0], projections))

    def rows(self, count: int, projections: tuple[Projection, ...]) -> tuple[slice, ...]:
        if len(projections) == 1:
            return (slice(0, count),)
        if self.interleaved:
            return slice(0, count, 2), slice(1, count, 2)
        return slice(0, count // 2), slice(count // 2, count)
