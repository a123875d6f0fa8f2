"""Recorded choices of the shipped model's routers during decode.

``record_routing`` wrote the file. It contains ids and weights of two routers for 78 tokens of two answers, and ids of
all routers for 16 answers.
"""

from pathlib import Path

from safetensors.torch import load_file

FILE = Path(__file__).with_name("routing.safetensors")
EXPERTS, TOP_K = 32, 4


def recorded_steps(batch):
    """Yield layer, ids and weights of each recorded step, in order.

    Ids are int64 and weights float32, both [batch, top_k].
    """
    chosen = load_file(FILE)
    for first in range(0, len(chosen["ids"]) - batch + 1, batch):
        for layer in range(chosen["ids"].shape[1]):
            at = slice(first, first + batch), layer
            yield layer, chosen["ids"][at].long(), chosen["weights"][at].float()


def recorded_streams(batch):
    """Yield the experts of answers that are decoded together, one batch at a time.

    Each is uint8 [batch, steps, layers, top_k].
    """
    streams = load_file(FILE)["streams"].numpy()
    for first in range(0, len(streams), batch):
        yield streams[first : first + batch]
