"""Rows that fill up a captured graph's batch: none of our layers sees them, whatever vLLM has routed them to.

Every batch here is served twice on small random layers, as it is and filled up to eight rows, and everything that can
be observed afterwards is compared: what the real rows got, counts, the cache, predictions, traces and calibrations.
"""

from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from tests.predict.gates import random_gates
from tests.predict.made_up import made_up
from tests.runtime.steps import kept_by, with_budget
from tests.small_model import make_experts, make_store
from tests.vllm_adapter.steps import rank_of, scheduled
from tests.vllm_adapter.test_observers import new
from tests.vllm_adapter.test_prompts import queries_and_keys
from vllm_dymoe.kernels import Activation
from vllm_dymoe.observe.recorder import Recorder as TraceRecorder
from vllm_dymoe.observe.trace import Trace
from vllm_dymoe.predict import RoutedModel
from vllm_dymoe.predict.expert_mlp import Architecture
from vllm_dymoe.predict.folded import fold
from vllm_dymoe.predict.trained import TrainedPredictor
from vllm_dymoe.quantize.recording import CalibrationError
from vllm_dymoe.residency.identity import ModelIdentity
from vllm_dymoe.systems import SYSTEMS
from vllm_dymoe.training import Recipe, train
from vllm_dymoe.vllm_adapter import step as step_module
from vllm_dymoe.vllm_adapter.moe_method import DymoeMoEMethod
from vllm_dymoe.vllm_adapter.observers import Observation, TraceObserver
from vllm_dymoe.vllm_adapter.running import RankLayer
from vllm_dymoe.vllm_adapter.step import PromptTap

LAYERS, EXPERTS, TOP_K, HIDDEN, ROWS = 4, 8, 2, 64, 8
STORE = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, hidden=HIDDEN))
SIZES = ModelIdentity("a model", "0123456789abcdef", LAYERS, EXPERTS, TOP_K, HIDDEN)
ATTENTION = SimpleNamespace(impl=SimpleNamespace(scale=0.25), sliding_window=None)
# Tokens of the requests in each step: a prompt, two that decode, both at once, one alone, and a batch that is full.
STEPS = [(5,), (1, 1), (1, 4), (1,), (1,), (3, 1), (8,)]
TOKENS = sum(map(sum, STEPS))
# What the padding is routed to: as vLLM 0.32 does it, and as it did before, where it may be any expert.
PADDING = {"to no expert": -1, "as tokens": 3}
# The expert of each of 16 on this rank, as vLLM gives it to expert parallelism; the last one of all is here.
HALF = torch.tensor([-1, 0, -1, 1, 2, -1, -1, 3, 4, -1, 5, -1, -1, 6, -1, 7], dtype=torch.int32)
NETWORK = fold(train(made_up(sizes=SIZES), Architecture((), history=2), Recipe(epochs=1, batch=64)).model)


def predictor_of(system, trained, expert_map):
    if trained:
        return TrainedPredictor(NETWORK, TOP_K)
    local = None if expert_map is None else tuple(expert_map.tolist())
    gates, _ = random_gates(LAYERS, len(local or range(EXPERTS)), HIDDEN, local=local)
    gates = [replace(gate, logits=lambda x, logits=gate.logits: logits(x.float())) for gate in gates]
    return system.foresight and system.foresight.make(RoutedModel(LAYERS, EXPERTS, TOP_K, gates=gates, hidden=HIDDEN))


def recording_rank(folder, runtime, total):
    """A rank that records what routers choose and what experts read, without the vLLM around it."""
    model = {"layers": list(range(LAYERS)), "hidden_size": HIDDEN, "top_k": TOP_K, "dtype": "bfloat16"}
    observation = Observation(model)
    rank = rank_of(runtime, observation=observation)
    rank.prompts = PromptTap(lambda: runtime.system, rank.step)
    observation.record(folder / "part", TOKENS)
    observation.trace = TraceObserver(TraceRecorder(folder, replace(SIZES, num_experts=total), 2**20, inputs=True))
    observation.join(observation.trace)
    return rank


def layers_of(rank, expert_map):
    for position in range(LAYERS):
        method = DymoeMoEMethod.__new__(DymoeMoEMethod)
        method.layer = RankLayer("", position, Activation.SILU, None)
        method._loader = SimpleNamespace(check_complete=lambda: None)
        method.loading = SimpleNamespace(layer_loaded=lambda position, layer: None)
        method.process_weights_after_loading(SimpleNamespace(expert_map=expert_map))
        yield method.layer


def batch(random, real, total, padding):
    """Eight rows of which the first are tokens; nothing may be made of the others."""
    x = torch.randn(ROWS, HIDDEN, generator=random).bfloat16()
    weights, ids = torch.rand(ROWS, total, generator=random).topk(TOP_K)
    x[real:] = weights[real:] = torch.nan
    ids[real:] = padding
    return x, weights, ids.int()


def served(folder, monkeypatch, padding, system="exact", trained=False, expert_map=None, **parameters):
    """Serve all steps; what came out for the tokens, and all that can be observed afterwards.

    Args:
        padding: the expert that rows of padding are routed to; None leaves them out.
    """
    folder.mkdir()
    monkeypatch.setattr(step_module, "get_tensor_model_parallel_world_size", lambda: 1)
    system = SYSTEMS[system](**parameters)
    budget = "80%" if system.residency.migrating else "50%"  # where every expert is there
    runtime = with_budget(STORE, budget, system, predictor=predictor_of(system, trained, expert_map))
    total = EXPERTS if expert_map is None else len(expert_map)
    rank = recording_rank(folder, runtime, total)
    layers = list(layers_of(rank, expert_map))
    random = torch.Generator().manual_seed(0)
    outputs, predicted = [], []
    for number, tokens in enumerate(STEPS):
        real = sum(tokens)
        rows = real if padding is None else ROWS
        starts = torch.tensor([0, *tokens, 0, 0]).cumsum(0)
        context = SimpleNamespace(attn_metadata={"": SimpleNamespace(query_start_loc=starts)}, additional_kwargs={})
        monkeypatch.setattr(step_module, "get_forward_context", lambda context=context: context)
        step = scheduled(*tokens, new=[new("a", 9), new("b", 9)] if number == 0 else ())
        rank.begin_step(step)
        for layer in layers:
            query, key = queries_and_keys(ROWS, seed=number)
            query[real:] = key[real:] = torch.nan
            rank.prompts.attend(ATTENTION, query[:rows], key[:rows])
            x, weights, ids = batch(random, real, total, padding or 0)
            out = rank.forward(layer, x[:rows], weights[:rows], ids[:rows])
            assert out.shape == (rows, HIDDEN)
            assert not out[real:].any(), "padding is computed"
            outputs.append(out[:real])
            if runtime.predictor is not None:
                predicted.append(runtime.predictor.predict(layer.position))
        names = ["a", "b"][: len(tokens)]
        runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=names), positions=torch.arange(99))
        assert rank.end_model(runner, step, None) is None
        rank.end_step(None)
    rank.observation.end_record()
    rank.observation.trace.recorder.close()
    runtime.check_integrity()
    stats = asdict(runtime.stats())
    runtime.engine.close()
    trace = Trace.load(folder)
    return outputs, {
        "counts": {name: value for name, value in stats.items() if not name.endswith("seconds")},
        "cache": {tier: sorted(kept) for tier, kept in kept_by(runtime).items()},
        "predicted": predicted,
        "trace": [
            getattr(trace, name).tolist() for name in ("experts", "weights", "request", "position", "router_inputs")
        ],
        "calibration": (folder / "part").read_bytes(),
    }


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Serve the steps as they are and with padding; everything has to be equal."""

    def compare(padding, **settings):
        outputs, alone = served(tmp_path / "alone", monkeypatch, None, **settings)
        padded_outputs, padded = served(tmp_path / "padded", monkeypatch, padding, **settings)
        assert all(torch.equal(a, b) for a, b in zip(outputs, padded_outputs, strict=True))
        for what, seen in alone.items():
            assert padded[what] == seen, what
        keeps = SYSTEMS[settings.get("system", "exact")]().residency.keeps
        assert alone["counts"]["hits" if keeps else "misses"] > 0
        assert len(alone["trace"][0]) == TOKENS
        return alone

    return compare


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize("system", SYSTEMS)
def test_no_system_sees_padding(check, system, padding):
    seen = check(padding, system=system, **({"retention": 0.5} if system == "dymoe" else {}))
    if system == "dymoe":
        assert min(seen["counts"]["planned"][tier] for tier in ("hi", "lo")) > 0


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize(
    "settings",
    [*({"system": name} for name, kind in SYSTEMS.items() if kind().foresight), {"trained": True}],
    ids=str,
)
def test_no_predictor_sees_padding(check, settings, padding):
    seen = check(padding, **settings)
    assert any(seen["predicted"])
    assert seen["counts"]["predictions"]["wanted"] > 0


@pytest.mark.parametrize("padding", PADDING.values(), ids=PADDING)
@pytest.mark.parametrize(
    "settings",
    [{"system": "dymoe", "look_ahead": 0}, {"system": "duoserve"}, {"system": "exact"}, {"system": "firm"}],
    ids=str,
)
def test_padding_is_told_from_the_experts_of_other_ranks(check, settings, padding):
    seen = check(padding, expert_map=HALF, **settings)
    experts = {expert for token in seen["trace"][0] for layer in token for expert in layer}
    assert experts == set(range(16)), "a trace has the experts of all ranks"


def test_what_a_warm_up_leaves_out_is_not_the_last_experts(tmp_path):
    """While vLLM captures graphs every row is padding, and there is no step that could say so."""
    runtime = with_budget(STORE, "50%")
    rank = recording_rank(tmp_path, runtime, len(HALF))
    first, *_ = layers_of(rank, HALF)
    x, weights, _ = batch(torch.Generator(), ROWS, EXPERTS, 0)
    ids = torch.full((ROWS, TOP_K), -1, dtype=torch.int32)
    assert torch.equal(rank.forward(first, x, weights, ids), torch.zeros_like(x))
    assert runtime.stats().resident_experts["hi"] == 0
    with pytest.raises(CalibrationError, match=f"computed {TOKENS} tokens less than the {TOKENS}"):
        rank.observation.end_record()
    runtime.engine.close()
