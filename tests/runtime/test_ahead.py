"""Steps without the host that fetch ahead: the same bits, right guesses or wrong ones, in slots of their own."""

import pytest
import torch

from tests.predict.gates import random_gates
from tests.runtime.decided import check_decided, decided_runtime, decode, decode_wide
from tests.runtime.steps import BUDGETS, equal, forward, make_runtime, random_step
from tests.small_model import make_experts, make_store
from vllm_dymoe.predict import Gate
from vllm_dymoe.predict.next_gate import NextGate
from vllm_dymoe.systems.dymoe import Dymoe
from vllm_dymoe.systems.exact import Exact

LAYERS = 4
STORE = make_store(make_experts(layers=LAYERS, num_experts=16))
HIDDEN, EXPERTS, TOP_K = STORE.experts.formats[4].hidden, STORE.experts.num_experts, STORE.experts.top_k
MIXED = {"retention": 0.5, "high_by": "depth", "reuse_high": False}


def gates():
    return [Gate(lambda x, gate=gate: gate.logits(x.float())) for gate in random_gates(LAYERS, EXPERTS, HIDDEN)[0]]


def whole_step(run, seed, tokens):
    """Every layer: each router applies its gate to an input that changes little from layer to layer."""
    x, outputs = random_step(seed, tokens, STORE.experts)[0].float(), []
    for layer, gate in enumerate(gates()):
        x = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(100 * seed + layer))
        ids, weights = gate.best(x, TOP_K)
        outputs.append(run(layer, x.to(torch.bfloat16), weights, ids.int()))
    return outputs


STEPS = [(seed, (1, 1, 4, 1, 40, 1)[seed % 6]) for seed in range(12)]


def run_all(runtime, *, decided):
    outputs = []
    for seed, tokens in STEPS:
        one = (decode if tokens <= 16 else decode_wide) if decided else forward
        outputs += whole_step(lambda *layer, one=one: one(runtime, *layer), seed, tokens)
        if decided:
            check_decided(runtime)
    return outputs


@pytest.fixture(scope="module")
def want():
    """By system, with everything there and the host's path."""
    return {
        "exact": run_all(make_runtime(STORE, system=Exact()), decided=False),
        "dymoe": run_all(make_runtime(STORE, system=Dymoe(**MIXED)), decided=False),
    }


@pytest.mark.parametrize("system", ["exact", "dymoe"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_no_guess_changes_a_bit(want, system, budget):
    for projections in (2, 8):
        chosen = Exact(ahead_in_graph=projections) if system == "exact" else Dymoe(ahead_in_graph=projections, **MIXED)
        runtime = decided_runtime(STORE, budget, chosen, predictor=NextGate(gates(), TOP_K))
        assert equal(run_all(runtime, decided=True), want[system])
        stats = runtime.stats()
        room = bool(runtime.memory.device_side.table.ahead[:, 1].any())
        assert room or budget != "50%"
        assert (stats.bytes_moved["prefetch"] > 0) == (room and stats.misses > 0)
        assert runtime.budget.reserved <= runtime.budget.limit


def test_good_guesses_take_bytes_from_demand_and_change_neither_hits_nor_what_is_kept():
    beside, alone = (
        decided_runtime(STORE, "50%", Exact(ahead_in_graph=6), predictor=NextGate(gates(), TOP_K)) for _ in range(2)
    )
    alone.memory.device_side.table.most_ahead.zero_()
    for runtime in (beside, alone):
        run_all(runtime, decided=True)
    ours, theirs = beside.stats(), alone.stats()
    assert (ours.hits, ours.misses, ours.evictions) == (theirs.hits, theirs.misses, theirs.evictions)
    assert torch.equal(beside.memory.device_side.table.tier, alone.memory.device_side.table.tier)
    used = theirs.bytes_moved["demand"] - ours.bytes_moved["demand"]
    guesses = ours.prefetches
    assert guesses["useful"] > guesses["wasted"] > 0
    assert 0 < used < ours.bytes_moved["prefetch"]
    assert theirs.bytes_moved["prefetch"] == 0


def test_prompts_and_budgets_between_steps_take_the_slots_back(want):
    """A prompt streams through slots beside those of guesses, which may still serve it."""
    runtime = decided_runtime(STORE, "50%", Exact(ahead_in_graph=9), predictor=NextGate(gates(), TOP_K))
    table = runtime.memory.device_side.table
    outputs = iter(want["exact"])
    for number, (seed, tokens) in enumerate(STEPS):
        one = decode if tokens <= 16 else decode_wide
        for got in whole_step(lambda *layer, one=one: one(runtime, *layer), seed, tokens):
            assert torch.equal(got, next(outputs))
        if number % 4 == 3:
            runtime.resize(("25%", "75%", "50%")[number // 4])
            assert (table.staged_for == -1).all()


def test_without_its_predictor_nothing_is_fetched_ahead():
    runtime = decided_runtime(STORE, "50%", Exact(ahead_in_graph=6), predictor=NextGate(gates(), TOP_K))
    runtime.memory.device_side.fetch_ahead(6)
    whole_step(lambda *layer: decode(runtime, *layer), 0, 2)
    moved = runtime.stats().bytes_moved["prefetch"]
    assert moved > 0
    runtime.drop_predictor()
    assert not runtime.memory.device_side.most_ahead
    whole_step(lambda *layer: decode(runtime, *layer), 0, 2)
    assert runtime.stats().bytes_moved["prefetch"] == moved


def test_without_a_predictor_or_the_option_there_is_no_branch():
    assert decided_runtime(STORE, "50%", Exact(ahead_in_graph=6)).decode.ahead is None
    assert decided_runtime(STORE, "50%", Exact(), predictor=NextGate(gates(), TOP_K)).decode.ahead is None
