"""A model on several ranks: what one of them holds, reads and sends; every rank has a link of its own or a part of one.

Of ``n`` ranks that share out the experts a rank has E/n, of which a token of any engine uses k/n. Engines gather each
other's rows in front of the experts and add up behind them; ranks of tensor parallelism add up behind attention and
behind the experts, in a ring (2 (tp - 1) / tp of the rows). Both share the link with the experts that are fetched.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from vllm_dymoe.bench.cases import ENGINES
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.choice import Choice
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.model import ITEM, ModelShape

_ROUTED = 8  # bytes of an expert's number and weight, which travel with a row


@dataclass(frozen=True)
class Ranks:
    """How a model is spread: vLLM's sizes, and how ranks are connected."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: bool = False  # ranks of tp and dp share out whole experts
    nodes: int = 1
    per_switch: int = 1  # cards that share one link to the host
    network: float = 0.0  # bytes per second between a node and the others

    def check(self) -> None:
        """ConfigError for what is refused at start, or cannot be planned."""
        self._check_sizes()
        if self.nodes > 1 and not self.network:
            raise ConfigError("say how fast a node reaches the others: --network 12GB/s.")

    def _check_sizes(self) -> None:
        if self.dp > 1 and self.pp > 1:
            raise ConfigError("data parallelism does not go with stages of a pipeline; leave --pp out.")
        if self.count % self.nodes:
            raise ConfigError(f"{self.count} ranks cannot be spread evenly over {self.nodes} nodes; change --nodes.")

    @property
    def count(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def experts_over(self) -> int:
        """Ranks that share out the experts of a layer."""
        return self.tp * self.dp if self.ep else 1

    @property
    def meets(self) -> bool:
        """Tokens of several engines meet at the experts."""
        return self.ep and self.dp > 1

    def shape(self, model: ModelShape) -> ModelShape:
        """What one rank has of a model: the largest part, where it is not even."""
        tp, whole = self.tp, self.ep or self.tp == 1
        return replace(
            model,
            layers=ceil(model.layers / self.pp),
            moe_layers=ceil(model.moe_layers / self.pp),
            experts=ceil(model.experts / self.experts_over),
            top_k=max(1, round(model.top_k / self.experts_over)),
            intermediate=model.intermediate if whole else ceil(model.intermediate / tp),
            attention_weights=model.attention_weights // tp,
            token_weights=model.token_weights // (tp * self.pp),
            dense_weights=model.dense_weights // (tp * self.pp),
            attention_width=model.attention_width // tp,
            kv_bytes=model.kv_bytes * ceil(model.kv_heads / tp) // (model.kv_heads * self.pp),
        )

    def device(self, card: Device) -> Device:
        """A card as one rank has it."""
        return replace(card, link=card.link / self.per_switch, decides=card.decides and not self.meets)

    def sent(self, model: ModelShape, tokens: int) -> tuple[float, float]:
        """Bytes that a rank receives and sends in a step of so many tokens of each engine: within its node, and from
        other nodes."""
        row, near, far = model.hidden * ITEM, 0.0, 0.0
        if self.meets:
            there = max(1, self.dp // self.nodes)  # engines of a node
            each = model.moe_layers * tokens * (2 * row + model.top_k * _ROUTED)
            near, far = (there - 1) * each, (self.dp - there) * each
        if self.tp > 1:
            sums = model.layers + (0 if self.meets else model.layers)
            ring = sums * tokens * row * 2 * (self.tp - 1) / self.tp
            within = self.nodes <= self.dp * self.pp  # a node has whole engines
            near, far = (near + ring, far) if within else (near, far + ring)
        return near, far

    def seconds(self, model: ModelShape, card: Device, tokens: int) -> float:
        """Time of those bytes, beside which no experts come."""
        near, far = self.sent(model, tokens)
        each = self.network * self.nodes / self.count  # ranks of a node share its network
        return near / self.device(card).link + (far / each if far else 0.0)

    def whole(self, row: Choice, model: ModelShape, card: Device, batch: int, prompt: int) -> Choice:
        """What was planned for one rank, with what a token waits for: every stage, and the other ranks."""
        return replace(
            row,
            tpot=self.pp * row.tpot + self.seconds(model, card, batch),
            ttft=self.pp * row.ttft + self.seconds(model, card, prompt),
        )

    def _sizes(self) -> dict[str, int]:
        sizes = {"tensor_parallel_size": self.tp, ENGINES: self.dp, "pipeline_parallel_size": self.pp}
        return {name: size for name, size in sizes.items() if size > 1}

    @property
    def arguments(self) -> str:
        """Of ``vllm serve``."""
        said = [f" --{name.replace('_', '-')} {size}" for name, size in self._sizes().items()]
        return "".join(said) + " --enable-expert-parallel" * self.ep

    def for_engines(self) -> dict[str, Any]:
        """Arguments of vLLM's ``LLM``, which starts ranks on other machines through Ray; ConfigError for what is
        refused or cannot be started from here."""
        self._check_sizes()
        if self.nodes > 1 and self.dp > 1:
            raise ConfigError(
                "the engines of data parallelism are started on this machine; leave --nodes out, or serve on all nodes "
                "and measure with `vllm bench serve`."
            )
        given: dict[str, Any] = self._sizes() | ({"enable_expert_parallel": True} if self.ep else {})
        return given | ({"distributed_executor_backend": "ray"} if self.nodes > 1 else {})
