"""A model on several ranks: what each rank holds, reads and sends.

Every rank has its own link or a share of one.

If ``n`` ranks share the experts, a rank has E/n of them and a token uses k/n of them there. Data-parallel engines
gather each other's rows before the experts and add up after them; tensor-parallel ranks add up after attention and
after the experts, in a ring (2 (tp - 1) / tp of the rows). Both share the link with the experts that are fetched.
"""

from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from vllm_dymoe.bench.cases import ENGINES
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.choice import Choice
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.model import ITEM, ModelShape

_ROUTED = 8  # bytes of an expert's number and weight, which are sent with a row


@dataclass(frozen=True)
class Ranks:
    """How a model is distributed: vLLM's parallel sizes, and how ranks are connected."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: bool = False  # ranks of tp and dp share whole experts
    nodes: int = 1
    per_switch: int = 1  # number of cards that share one link to the host
    network: float = 0.0  # bytes per second between a node and the others

    def check(self) -> None:
        """Raise ConfigError for settings that a start refuses, or that cannot be planned."""
        self._check_sizes()
        if self.nodes > 1 and not self.network:
            raise ConfigError("set the rate between nodes: --network 12GB/s.")

    def _check_sizes(self) -> None:
        if self.dp > 1 and self.pp > 1:
            raise ConfigError("data parallelism does not support pipeline stages; leave --pp out.")
        if self.count % self.nodes:
            raise ConfigError(f"{self.count} ranks cannot be spread evenly over {self.nodes} nodes; change --nodes.")

    @property
    def count(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def on_machine(self) -> int:
        """Number of ranks of one machine."""
        return self.count // self.nodes

    @property
    def experts_over(self) -> int:
        """Number of ranks that share the experts of a layer."""
        return self.tp * self.dp if self.ep else 1

    @property
    def meets(self) -> bool:
        """Whether engines exchange tokens before the experts."""
        return self.ep and self.dp > 1

    def shape(self, model: ModelShape) -> ModelShape:
        """Return a model with the sizes of one rank: the largest part, if parts differ."""
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
            held=model.held and replace(model.held, weights=model.held.weights // (tp * self.pp)),
            attention_width=model.attention_width // tp,
            kv_bytes=model.kv_bytes * ceil(model.kv_heads / tp) // (model.kv_heads * self.pp),
        )

    def device(self, card: Device) -> Device:
        """Return what one rank has of a device.

        The ranks of a machine share its CPU and its disk, and cards behind a switch share a link.
        """
        ranks = self.on_machine
        own = replace(card, link=card.link / self.per_switch, host=card.host / ranks, disk=card.disk / ranks)
        if not card.is_cpu:
            return own
        rates = tuple(replace(rate, read=rate.read / ranks, compute=rate.compute / ranks) for rate in card.rates)
        dense = tuple(replace(rate, weights=rate.weights / ranks) for rate in card.dense)
        bandwidth, compute = card.bandwidth / ranks, card.compute / ranks
        return replace(own, bandwidth=bandwidth, compute=compute, rates=rates, dense=dense)

    def sent(self, model: ModelShape, tokens: int) -> tuple[float, float]:
        """Return the bytes that a rank exchanges in a step.

        Args:
            tokens: number of tokens of each engine.

        Returns:
            bytes within its node, and bytes from other nodes.
        """
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
        """Return the seconds of those transfers, during which no experts are fetched."""
        near, far = self.sent(model, tokens)
        each = self.network / self.on_machine  # ranks of a node share its network
        return near / self.device(card).link + (far / each if far else 0.0)

    def whole(self, row: Choice, model: ModelShape, card: Device, batch: int, prompt: int) -> Choice:
        """Return what was planned for one rank, with the time for all ranks.

        A token also waits for all stages and for transfers between ranks.
        """
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
        """Arguments for ``vllm serve``."""
        said = [f" --{name.replace('_', '-')} {size}" for name, size in self._sizes().items()]
        return "".join(said) + " --enable-expert-parallel" * self.ep

    def for_engines(self) -> dict[str, Any]:
        """Return arguments for vLLM's ``LLM``.

        It starts ranks on other machines through Ray.

        Raises:
            ConfigError: settings are refused, or cannot be started from here.
        """
        self._check_sizes()
        if self.nodes > 1 and self.dp > 1:
            raise ConfigError(
                "bench starts data-parallel engines on this machine only; leave --nodes out, or serve on all nodes "
                "and measure with `vllm bench serve`."
            )
        given: dict[str, Any] = self._sizes() | ({"enable_expert_parallel": True} if self.ep else {})
        return given | ({"distributed_executor_backend": "ray"} if self.nodes > 1 else {})
