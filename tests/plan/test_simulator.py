"""The simulator of schedules: data sheets, and each policy's timeline."""

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

from vllm_dymoe.experts.encoding import encoding_of
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts, stored_formats
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import Options
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import Device
from vllm_dymoe.plan.simulator import Model, Simulator, sessions
from vllm_dymoe.planner.hotness import Swap
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.policies import make_policy
from vllm_dymoe.prefetch import Candidate, Predictor
from vllm_dymoe.trace.synthetic import synthetic_trace

LAYERS, EXPERTS, TOP_K = 4, 16, 2
SIZES = ModelIdentity("m", "f", LAYERS, EXPERTS, TOP_K, 64)
TRACE = synthetic_trace(SIZES, requests=4, prompt=24, decode=40, skew=0.8, locality=0.4)
DEVICE = Device("d", 1 << 35, bandwidth=8e11, compute=8e13, link=2e10)
ATTENTION = 40_000_000


def experts(bits):
    def form(width):
        return ExpertFormat(2048, 768, encoding_of(width), 64, torch.bfloat16)

    return ModelExperts(tuple(range(LAYERS)), EXPERTS, TOP_K, stored_formats(bits, form))


def simulator(given, share=0.5, device=DEVICE, costs=None, **how):
    options = Options(planning="host", **given)
    packed = experts(tuple(options.stored_bits))
    whole = packed.formats[options.high].whole_nbytes
    limit = how.pop("limit", int(share * LAYERS * EXPERTS * whole))
    costs = Costs.nothing() if costs is None else costs
    return Simulator(TRACE, Model(packed, ATTENTION), options, make_policy(options), device, costs, limit, **how)


def decoded(given, share=0.5, **how):
    return simulator(given, share, **how).run(list(sessions(TRACE)))


def of_a_token():
    nbytes = experts((4,)).formats[4].nbytes
    reading = LAYERS * (ATTENTION + TOP_K * nbytes) / DEVICE.bandwidth
    return nbytes, reading, LAYERS * TOP_K * nbytes / DEVICE.link


def test_without_overlap_a_token_takes_computing_and_moving():
    _, reading, moving = of_a_token()
    found = decoded({"policy": "on-demand", "policy_options": {"overlap": False}}).of(Phase.DECODE)
    assert found == pytest.approx(np.full(160, reading + moving))
    overlapping = decoded({"policy": "on-demand"}).of(Phase.DECODE)
    assert (overlapping < found).all()
    assert (overlapping >= max(reading, moving)).all()


def test_with_everything_there_a_token_is_read_from_memory_and_nothing_moves():
    given = {"policy": "exact", "policy_options": {"look_ahead": 0}}
    served = simulator(given, 1.0)
    served.run(list(sessions(TRACE)), measured=False)
    found = served.run(list(sessions(TRACE)))
    assert found.of(Phase.DECODE) == pytest.approx(np.full(160, of_a_token()[1]))
    assert found.moved == 0
    assert found.hits == found.active


def test_the_hosts_work_is_charged_for_each_layer_and_miss():
    given, costs = {"policy": "on-demand", "policy_options": {"overlap": False}}, Costs(1e-3, 1e-5, 0, 0, 0)
    free, charged = (decoded(given, costs=of).of(Phase.DECODE) for of in (None, costs))
    assert charged - free == pytest.approx(np.full(160, LAYERS * (1e-3 + 1e-5)), rel=0.05), "copies start one by one"


class Knows(Predictor):
    """Predicts the next layer's choices from the trace, and ``wrong`` other experts."""

    def __init__(self, wrong=0):
        super().__init__()
        self.wrong, self.coming = wrong, None

    def observe(self, routing):
        self.coming = None
        if len(routing.ids) > 1:
            return
        (number,) = (
            (TRACE.experts[:, routing.layer] == routing.ids.to(TRACE.experts.dtype)).all(1)
            & (TRACE.weights[:, routing.layer].float() == routing.weights).all(1)
        ).nonzero()[:1, 0].tolist() or (0,)
        self.coming = None if routing.layer + 1 == LAYERS else TRACE.experts[number, routing.layer + 1].tolist()

    def predict(self, layer):
        if layer < 0 or self.coming is None:
            return []
        wrong = [expert for expert in range(EXPERTS) if expert not in self.coming][: self.wrong]
        return [Candidate(layer + 1, expert) for expert in (*wrong, *self.coming)]


def test_a_right_prediction_hides_copies_a_wrong_one_costs_and_a_question_costs_what_it_costs():
    given = {"policy": "exact"}
    asked = {"costs": Costs(0, 0, 0, 0, 0, {"next gate": 0.0})}
    nothing = decoded({**given, "policy_options": {"look_ahead": 0}}, 0.3)
    right, wrong = (decoded(given, 0.3, predictor=Knows(of), **asked) for of in (0, 4))
    dear = decoded(given, 0.3, predictor=Knows(), costs=replace(asked["costs"], questions={"next gate": 2e-3}))
    times = [of.of(Phase.DECODE).mean() for of in (right, nothing, dear)]
    assert times[0] < 0.97 * times[1]
    assert times[2] > times[1]
    assert wrong.moved > right.moved
    assert right.correct > 0.99 * right.predicted, "some tokens are alike"


def test_moesys_cancels_nothing():
    given = {"policy": "layer-prefetch"}
    everything = LAYERS * EXPERTS * experts((4,)).formats[4].nbytes
    limit = EXPERTS * experts((4,)).formats[4].nbytes
    kept, cancelled = (
        decoded(given, limit=limit, predictor=make_policy(Options(**given)).prefetch.make(SIZES), fetches_all=of)
        for of in (True, False)
    )
    steps = 160 + 4
    first = LAYERS * 0 + 1  # a first layer's experts are fetched on demand
    assert kept.moved > (LAYERS - 1) / LAYERS * everything * steps * first * 0.99
    assert kept.of(Phase.DECODE).mean() > 1.5 * cancelled.of(Phase.DECODE).mean()


def test_batches_share_experts_and_requests_end_to_end_are_all_their_steps():
    one, four = (simulator({"policy": "exact"}).run(list(sessions(TRACE, batch))) for batch in (1, 4))
    assert len(one.of(Phase.DECODE)) == 160
    assert len(four.of(Phase.DECODE)) == 40
    assert four.summary()["tokens_per_s"] > one.summary()["tokens_per_s"]
    assert sum(one.end_to_end().values()) == pytest.approx(sum(one.seconds))
    assert set(one.end_to_end()) == {0, 1, 2, 3}
    assert one.summary()["p50"] <= one.summary()["p95"] <= one.summary()["p99"]


@pytest.mark.parametrize("places", ["model", "layer"])
def test_moves_follow_traffic_and_no_step_waits(places):
    window = {"window_s": 0.002, "window_uses": 0.5, "high_set": places}
    served = simulator({"policy": "dynaexq", "low": 2, "policy_options": window}, 0.75)
    before = served.table.precision.copy()
    found = served.run(list(sessions(TRACE)))
    assert found.hits == found.active
    assert served._moves.moved > 0
    assert (served.table.precision != before).any()
    high = (served.table.precision == HIGH).sum(1)
    assert high.sum() <= sum(served.plan.quotas[Precision.HIGH])
    if places == "layer":
        assert (high <= served.plan.quotas[Precision.HIGH]).all()


@pytest.mark.parametrize(("versions", "begun"), [((4, 2), 6), ((16, 4), 2)])
def test_as_many_moves_begin_as_where_a_server_moves_them(versions, begun):
    """A quarter of 16 seconds of the link's time is available, of which 1 s is spent.

    Nested moves of half a second each fill the other 3 s.
    """
    high, low = versions
    window = {"window_s": 1e9, "in_flight": 2, "link_share": 0.25}
    served = simulator({"policy": "dynaexq", "high": high, "low": low, "policy_options": window}, 0.75)
    moves, held = served._moves, served.table.precision == HIGH
    moves._busy, moves.moved, moves._spent = 1.0, 10, 5.0
    up, down = (list(zip(*of.nonzero(), strict=True)) for of in (~held, held))
    moves._planned.extend(Swap(1.0, one, other) for one, other in zip(up, down, strict=False))
    assert len(moves._planned) > begun
    served.now = 3.9
    moves.turn()
    assert not moves._flying, "a second of the link has to be paid for"
    served.now = 16.0
    moves.turn()
    assert len(moves._flying) == begun


def test_adaptive_fetches_fewer_slices_the_higher_the_threshold_and_keeps_none():
    def run(threshold):
        given = {"policy": "adaptive", "low": 2, "policy_options": {"threshold": threshold, "window_s": 1e9}}
        served = simulator(given, 0.75)
        before = served.table.precision.copy()
        found = served.run(list(sessions(TRACE)))
        assert np.array_equal(served.table.precision, before)
        return found

    rows = [run(threshold) for threshold in (0.0, 1.0, 1.2, 1e6)]
    assert rows[0].fetched > rows[1].fetched > rows[2].fetched > rows[3].fetched == 0
    assert rows[0].high == rows[0].choices
    assert rows[1].seconds[-1] > rows[3].seconds[-1]


def test_in_prompts_experts_of_the_tokens_with_most_attention_are_high():
    """One token gets all attention, so its experts are the most important (Eq. 2)."""
    given = {"policy": "dymoe-paper", "low": 0, "policy_options": {"retention": 0.1, "heavy_share": 1 / 24}}
    step = next(iter(sessions(TRACE)))
    assert step.phase is Phase.PREFILL
    for heavy in (3, 17):
        attention = torch.zeros(len(TRACE.request), LAYERS)
        attention[step.tokens[heavy]] = 1.0
        served = simulator(given, attention=attention)
        for layer in range(LAYERS):
            own = set(TRACE.experts[step.tokens[heavy], layer].tolist())
            chosen = set(served._wanted(served._routing(step, layer)))
            assert chosen, "the ceiling of Eq. 5 leaves one"
            assert chosen <= own or own <= chosen
    every = simulator(given)
    assert bool(every._routing(step, 0).prompt.heavy.all()), "nothing is known of attention"


def test_costs_are_data_with_sources():
    found = json.loads(resources.files("vllm_dymoe.plan").joinpath("costs.json").read_text())
    assert set(found["sources"]) == set(found) - {"sources"}
    assert Costs.measured().host_layer == found["host_layer"] > found["graph_layer"]
    assert all(seconds > 0 for seconds in Costs.measured().questions.values())


def test_it_says_the_same_again():
    assert decoded({"policy": "dymoe", "low": 2}).seconds == decoded({"policy": "dymoe", "low": 2}).seconds


def test_every_request_of_a_step_costs_the_host_something():
    dear = replace(Costs.nothing(), step=1e-3, request=1e-4)
    free, charged = (simulator({"policy": "exact"}, costs=costs) for costs in (None, dear))
    assert charged.last(4) - free.last(4) == pytest.approx(1e-3 + 4e-4)
    found = [of.run(list(sessions(TRACE, 4))).of(Phase.DECODE) for of in (free, charged)]
    assert found[1] - found[0] == pytest.approx(np.full(len(found[0]), 1.4e-3))
