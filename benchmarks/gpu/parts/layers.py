"""The kernels' times for every layer shape, tier and number of tokens: `make bench-gpu`."""

from kernel_speeds import measure
from layers import LAYERS, TIERS, TOKENS
from record import Recorder


def run(record: Recorder) -> None:
    """Measure them all."""
    with record.check("the kernels' speeds could be measured"):
        measure(record, LAYERS, list(TIERS), TOKENS)
