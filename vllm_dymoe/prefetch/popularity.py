"""Predictors without a model: popularity, and every expert.

Popularity predicts the experts that the next layer chose most often so far (DuoServe-MoE Eq. 2):

    P_l(i) = sum_n 1(e_i in E_l,n) / sum_m sum_n 1(e_m in E_l,n)

over steps n. The paper counts over a fixed data set; a server's workload changes, so old steps fade.
"""

from collections.abc import Sequence

import torch

from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.planner.table import Table
from vllm_dymoe.prefetch.base import Candidate, Predictor
from vllm_dymoe.prefetch.on_device import AllExpertsOnDevice, DevicePredictor, PopularityOnDevice


class Popularity(Predictor):
    """Counts what layers want, and predicts the next layer's favourites.

    ``half_life`` is in steps.
    """

    def __init__(self, num_layers: int, num_experts: int, decode_experts: int, half_life: float = 1000) -> None:
        self._num_layers = num_layers
        self._decode_experts = min(decode_experts, num_experts)
        self._fade = 0.5 ** (1 / half_life)
        # On the host, where it is updated and used. In bfloat16, the default while models are built, counts stop at
        # 256.
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.float32, device="cpu")
        self._phase = Phase.DECODE

    def on_device(self, table: Table, experts: ModelExperts) -> DevicePredictor:
        return PopularityOnDevice(table, self._decode_experts)

    def begin_step(self, phase: Phase) -> None:
        self._phase = phase

    def observe(self, routing: Routing) -> None:
        chosen = routing.counts
        counts = torch.tensor(list(chosen.values()), dtype=torch.float32)
        self._counts[routing.layer].mul_(self._fade)[list(chosen)] += counts
        self._phase = routing.phase

    def predict(self, layer: int) -> Sequence[Candidate]:
        """Return the next layer's favourites.

        In a prefill, which uses nearly all experts, that is every expert that was ever used.
        """
        following = layer + 1
        if following >= self._num_layers:
            return []
        counts = self._counts[following]
        amount = self._decode_experts if self._phase is Phase.DECODE else len(counts)
        wanted, experts = counts.topk(amount)
        return [Candidate(following, expert) for expert in experts[wanted > 0].tolist()]


class AllExperts(Predictor):
    """Predicts all experts of the next layer, as MoESys does.

    A baseline of DuoServe-MoE, section 6.1.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self._answers = [
            [Candidate(layer, expert) for expert in range(num_experts)] if layer < num_layers else []
            for layer in range(1, num_layers + 1)
        ]

    def on_device(self, table: Table, experts: ModelExperts) -> DevicePredictor:
        return AllExpertsOnDevice(table, experts.top_k)

    def predict(self, layer: int) -> Sequence[Candidate]:
        return self._answers[layer]
