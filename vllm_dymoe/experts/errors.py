"""How far a store's experts are from the weights that they stand for, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True)
class ErrorRecord:
    """Relative errors, one number for each MoE layer; root of the sum of squares over all of its experts.

    Attributes:
        weight: by bit-width below 16, |W - dequantized W| / |W|.
        output: the same of X W^T, X being the inputs of a calibration; empty where there was none.
        fallbacks: the experts of each layer that the calibration saw too rarely, so that it was not used for them.
    """

    weight: Mapping[int, tuple[float, ...]]
    output: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    fallbacks: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As it stands in the manifest, where numbers are rounded to four digits."""

        def rounded(errors: Mapping[int, tuple[float, ...]]) -> dict[str, list[float]]:
            return {str(bits): [float(f"{error:.4g}") for error in layers] for bits, layers in errors.items()}

        return {
            "weight": rounded(self.weight),
            "output": rounded(self.output),
            "fallbacks": [list(experts) for experts in self.fallbacks],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it is something else.
        """

        def read(errors: Mapping[str, list[float]]) -> dict[int, tuple[float, ...]]:
            return {int(bits): tuple(float(error) for error in layers) for bits, layers in errors.items()}

        fallbacks = tuple(tuple(int(expert) for expert in experts) for experts in data["fallbacks"])
        return cls(read(data["weight"]), read(data["output"]), fallbacks)
