"""Measures the host time of each predictor, for vllm_dymoe/plan/costs.json.

A CPU evaluates networks and gates of Qwen3-30B-A3B's sizes, one token at a time. For a GPU the host enqueues about as
many small kernels. The costs of planning and launching come from tests/kernels/gpu_at_true_sizes.py on a GPU, and are
not changed here.
"""

import json
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.policies import POLICIES
from vllm_dymoe.prefetch import Predictor, RoutedModel
from vllm_dymoe.prefetch.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.prefetch.expert_mlp import ARCHITECTURES, ExpertMLP, States
from vllm_dymoe.prefetch.folded import fold
from vllm_dymoe.prefetch.gate import Gate

_FILE = Path(__file__).resolve().parents[2] / "vllm_dymoe" / "plan" / "costs.json"
_SIZES = ModelIdentity("sizes of Qwen3-30B-A3B", "", 12, 128, 8, 2048)
_ROUNDS = 30


def main() -> None:
    torch.set_num_threads(1)
    layers, experts, hidden = _SIZES.num_layers, _SIZES.num_experts, _SIZES.hidden
    gates = [Gate(partial(torch.nn.functional.linear, weight=torch.randn(experts, hidden))) for _ in range(layers)]
    model = RoutedModel(layers, experts, _SIZES.top_k, gates, hidden=hidden)
    with tempfile.TemporaryDirectory() as folder:
        network = Path(folder) / "network.safetensors"
        states = States(
            _SIZES, ARCHITECTURES["paper-shared"], torch.rand(layers, experts), torch.rand(layers - 1, experts, experts)
        )
        save_predictor(network, PredictorCard(_SIZES, {"name": "paper-shared"}), fold(ExpertMLP(states).eval()))
        trained = RoutedModel(layers, experts, _SIZES.top_k, gates, hidden=hidden, predictor=network)
        asked = {
            "exact": model,
            "firm-paper": model,
            "duoserve-paper": trained,
            "duoserve": model,
            "layer-prefetch": model,
        }
        questions = {}
        for name, given in asked.items():
            prefetch = POLICIES[name]().prefetch
            assert prefetch is not None
            questions[prefetch.name] = round(_seconds(prefetch.make(given)), 7)
    costs = json.loads(_FILE.read_text())
    costs["questions"] = questions
    costs["sources"]["questions"] = f"python benchmarks/papers/host_costs.py, one core of {platform.machine()}"
    _FILE.write_text(json.dumps(costs, indent=1) + "\n")
    print(json.dumps(costs, indent=1))


def _seconds(predictor: Predictor) -> float:
    """Return the median seconds of a prediction."""
    found, layers, experts = [], _SIZES.num_layers, _SIZES.num_experts
    for _ in range(_ROUNDS):
        for layer in range(layers - 1):
            ids = torch.randperm(experts)[: _SIZES.top_k].view(1, -1).int()
            at = Routing(layer, layers, torch.randn(1, _SIZES.hidden), ids, torch.full(ids.shape, 1 / _SIZES.top_k))
            assert at.active
            begun = time.perf_counter()
            predictor.observe(at)
            predictor.predict(layer)
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


if __name__ == "__main__":
    main()
