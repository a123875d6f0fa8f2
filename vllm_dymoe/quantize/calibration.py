"""What GPTQ needs for one expert, computed from recorded inputs.

gate and up read the inputs X [tokens, hidden] that the router sent to the expert, so their Hessian is X^T X. The inputs
of down, Y = activation(X gate^T) * X up^T, follow from them and the weights, and its Hessian is Y^T Y. A token's
experts are summed with their routing weights r, and so are their errors: each token counts r^2 (benchmarks/LOG.md).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vllm_dymoe.experts.format import ModelExperts, Projection
from vllm_dymoe.kernels.lattice import rotate
from vllm_dymoe.planner.threshold import curve_of
from vllm_dymoe.quantize.gptq import Curvature
from vllm_dymoe.quantize.held import Held, Matrix
from vllm_dymoe.quantize.recording import CalibrationError, Recording

# Tokens of an expert in memory at a time, as float32.
_CHUNK = 4096
# Tokens of each part used for threshold curves, and tokens of a prompt.
_READ, _PIECE = 1024, 512


class Calibration:
    """A complete recording.

    Raises CalibrationError if it is incomplete or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recording = Recording.read(folder)
        missing = self.recording.missing(folder)
        if missing:
            raise CalibrationError(
                f"{folder} lacks {len(missing)} of {len(self.recording.parts)} parts; run `vllm-dymoe calibrate` again "
                "with the same model and texts to resume it."
            )
        self._parts = []
        for number in range(len(self.recording.parts)):
            path = self.recording.part(folder, number)
            try:
                self._parts.append(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CalibrationError(
                    f"{path} cannot be read ({error}); remove it and run `vllm-dymoe calibrate` again."
                ) from error

    def check_belongs(self, model: str, experts: ModelExperts) -> None:
        """Raise CalibrationError if the recording is of another model.

        Models are compared by fingerprint and experts.
        """
        mine = self.recording
        if (mine.model, mine.layers, mine.num_experts) != (model, experts.layers, experts.num_experts):
            raise CalibrationError(
                f"{self.folder} is the calibration of another model (fingerprint {mine.model}, this one has {model}); "
                "run `vllm-dymoe calibrate` for this one."
            )

    def rare(self, layer: int) -> list[int]:
        """Return the experts with fewer tokens than inputs have columns.

        GPTQ is worse than HQQ there (benchmarks/LOG.md).
        """
        tokens = self.tokens(layer).tolist()
        return [expert for expert, seen in enumerate(tokens) if seen < self.recording.hidden_size]

    def tokens(self, layer: int) -> Tensor:
        """Return the number of tokens of each expert of a layer: int64 [num_experts]."""
        experts = torch.cat([self._tensor(part, layer, "experts").flatten() for part in range(len(self._parts))])
        return torch.bincount(experts.long(), minlength=self.recording.num_experts)

    def curves(self) -> tuple[tuple[float, ...], ...]:
        """Return start values of thresholds, see ``planner.threshold``.

        The first are for prompts in chunks, the second for single tokens.
        """
        prompts, tokens = [], []
        for layer, part in itertools.product(range(len(self.recording.layers)), range(len(self._parts))):
            experts, weights = (self._tensor(part, layer, name)[:_READ] for name in ("experts", "weights"))
            tokens.append(_even(weights))
            for ids, values in zip(experts.long().split(_PIECE), weights.split(_PIECE), strict=True):
                sums = torch.zeros(self.recording.num_experts).index_add_(0, ids.flatten(), values.flatten())
                prompts.append(_even(sums[sums > 0][None]))
        return curve_of(prompts), curve_of(tokens)

    def inputs(self, layer: int, expert: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the inputs of an expert in pieces.

        Each piece is inputs [tokens, hidden] and weights [tokens, 1], both float32. If ``expert`` is None, the inputs
        are the whole layer's, each token weighted like an average expert's.
        """
        for part in range(len(self._parts)):
            experts, weights = self._tensor(part, layer, "experts"), self._tensor(part, layer, "weights")
            chosen = torch.ones_like(experts, dtype=torch.bool) if expert is None else experts == expert
            rows = chosen.any(1).nonzero().flatten()
            inputs = self._tensor(part, layer, "inputs")
            weights = (weights * chosen).sum(1, keepdim=True)
            if expert is None:
                weights /= self.recording.top_k
                rows = rows[: -(-4 * self.recording.hidden_size // len(self._parts))]
            for some in rows.split(_CHUNK):
                yield inputs[some].float(), weights[some]

    def curvatures(
        self,
        layer: int,
        expert: int,
        matrices: Mapping[Projection, Matrix],
        rotations: tuple[int, int] = (0, 0),
        *,
        borrow: bool = False,
    ) -> tuple[Curvature, Curvature]:
        """Return the curvature of the inputs of an expert's gate and up, and of down.

        Inputs are rotated in blocks of ``rotations``. With ``borrow`` the inputs of gate and up are those of the whole
        layer. Raises CalibrationError if inputs are not finite.
        """
        function = self.recording.activation_of(layer)
        up = _linear(*matrices[Projection.UP])
        gate = _linear(*matrices[Projection.GATE]) if function.has_gate else None
        width = matrices[Projection.UP][0].shape[0]
        outer = torch.zeros(self.recording.hidden_size, self.recording.hidden_size)
        inner = torch.zeros(width, width)
        mass = 0.0
        for inputs, weights in self.inputs(layer, None if borrow else expert):
            mass += float(weights.square().sum())
            ups = up(inputs)
            activation = (function.alone(ups) if gate is None else function.gated(gate(inputs), ups)).mul_(weights)
            inner.addmm_(activation.t(), activation)
            inputs.mul_(weights)
            outer.addmm_(inputs.t(), inputs)
        try:
            first, second = (_rotated(*each) for each in zip((outer, inner), rotations, strict=True))
            return Curvature.of(first, mass), Curvature.of(second, mass)
        except ValueError as error:
            name = f"expert {expert} in layer {self.recording.layers[layer]}"
            raise CalibrationError(f"the calibration in {self.folder} cannot be used for {name}: {error}") from error

    def _tensor(self, part: int, layer: int, name: str) -> Tensor:
        found: Tensor = self._parts[part].get_tensor(f"{layer}.{name}")
        return found


def _even(weights: Tensor) -> NDArray[np.float32]:
    """Return weights as multiples of their row's even share: float32 [any, active]."""
    even: NDArray[np.float32] = (weights * weights.shape[1] / weights.sum(1, keepdim=True)).numpy()
    return even


def _rotated(hessian: Tensor, block: int) -> Tensor:
    return rotate(rotate(hessian, block).t().contiguous(), block) if block else hessian


def _linear(weight: Tensor | Held, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    assert isinstance(weight, Tensor), "calibrations are for 16-bit checkpoints"
    return partial(F.linear, weight=weight.float(), bias=None if bias is None else bias.float())
