"""How long a layer computes and how long an expert travels on the papers' machine, from its data sheet.

Both are bounds: decode that uses the whole memory bandwidth, and a copy that uses the whole link. An emulated link on
another machine is set to their ratio.
"""

from dataclasses import dataclass

MEMORY_BYTES_PER_SECOND = 936e9  # RTX 3090, GDDR6X
LINKS = {"PCIe 3 x16": 15.75e9, "PCIe 4 x16": 31.51e9}  # bytes per second, after the encoding


# Of the shape of which the shipped model is a miniature.
QWEN3_30B = {
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "top_k": 8,
    "expert_bytes": 2_654_208,
}


@dataclass(frozen=True)
class Shape:
    """One layer of a MoE model.

    Attributes:
        hidden: model width.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: of both.
        top_k: experts per token.
        expert_bytes: one packed expert.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    top_k: int
    expert_bytes: int

    @property
    def attention_weights(self) -> int:
        """Weights of the four projections, 16 bits each."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)


def decode_layer_seconds(shape: Shape) -> float:
    """A layer of one token with every expert on the device: reads its weights once."""
    return (2 * shape.attention_weights + shape.top_k * shape.expert_bytes) / MEMORY_BYTES_PER_SECOND


def ratio(shape: Shape, link: str) -> float:
    """Seconds that one expert travels for each second that one layer of one token computes."""
    return shape.expert_bytes / LINKS[link] / decode_layer_seconds(shape)
