"""Recorded choices of the shipped model's routers in decode; ``record_routing`` wrote the file.

It contains two routers for 78 tokens of two answers, with weights, and all routers for 16 answers.
"""

from pathlib import Path

from safetensors.torch import load_file

FILE = Path(__file__).with_name("routing.safetensors")
EXPERTS, TOP_K = 32, 4


def recorded_steps(batch):
    """Layer, ids int64 [batch, top_k] and weights float32 [batch, top_k] of each step, in order."""
    chosen = load_file(FILE)
    for first in range(0, len(chosen["ids"]) - batch + 1, batch):
        for layer in range(chosen["ids"].shape[1]):
            at = slice(first, first + batch), layer
            yield layer, chosen["ids"][at].long(), chosen["weights"][at].float()


def recorded_streams(batch):
    """Experts of answers that are decoded together, uint8 [batch, steps, layers, top_k], batch after batch."""
    streams = load_file(FILE)["streams"].numpy()
    for first in range(0, len(streams), batch):
        yield streams[first : first + batch]
