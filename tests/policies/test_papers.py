"""The papers' own policies: their equations, without additions by the plugin."""

import itertools

import numpy as np
import pytest
import torch

from tests.cache.test_migration import STORES, dynaexq
from tests.prefetch.gates import random_gates
from tests.prefetch.made_up import trained_on_made_up
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.planner.constants import Eviction
from vllm_dymoe.planner.hotness import Swap, layer_swaps
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, PromptTokens, Routing
from vllm_dymoe.planner.rule import HIGH
from vllm_dymoe.planner.table import Table, set_pools
from vllm_dymoe.policies import POLICIES, PolicyOptionError, make_policy
from vllm_dymoe.policies.papers import PAPERS
from vllm_dymoe.prefetch import RoutedModel
from vllm_dymoe.prefetch.checkpoint import PredictorError
from vllm_dymoe.prefetch.tuner import Heop, Setting
from vllm_dymoe.resolve import resolve_options

LAYERS, EXPERTS, HIDDEN, TOP_K = 8, 16, 5, 4


@pytest.mark.parametrize("name", [policy.name for policy in PAPERS])
def test_users_name_them_like_any_policy_and_set_their_parameters(name):
    predictor = {"predictor": "a"} if name == "duoserve-paper" else {}
    given = {"policy": name, "low": 2, **predictor}
    policy = make_policy(resolve_options(given, environment={}))
    assert type(policy) is POLICIES[name]
    parent = POLICIES[name.removesuffix("-paper")]
    assert isinstance(policy, parent)
    assert type(policy).model_fields.keys() == parent.model_fields.keys(), "presets have no parameters of their own"


def test_dymoe_chooses_by_equations_2_to_5_and_fetches_the_top_t_ahead():
    policy = POLICIES["dymoe-paper"]()
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]])
    weights = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 3)
    heavy = torch.tensor([False, False, True])
    prompt = PromptTokens(torch.ones(3, dtype=torch.bool), heavy, False)
    for layer in range(LAYERS):
        share = 0.5 * (np.cos(np.pi * layer / (LAYERS - 1)) + 1) / 2 + 0.5  # Eq. 4 with lambda 0.5, i.e. r = 0.75
        for rows, told, active in ((ids, prompt, 8), (ids[:1], None, 4)):
            t = int(np.ceil(share * active - 1e-9))
            plan = policy.precision.select(
                Routing(layer, LAYERS, torch.zeros(len(rows), 8), rows, weights[: len(rows)], prompt=told)
            )
            high = [expert for expert, precision in plan.items() if precision is Precision.HIGH]
            assert len(high) == t
            first = {4, 5, 6, 7} if told else {0, 1, 2, 3}
            assert first & set(high) == set(sorted(first)[: min(t, 4)]), "heavy hitters' experts first, or weights"
            named = list(range(active))
            assert policy.precision.precisions_ahead(layer, LAYERS, named) == dict.fromkeys(named[:t], Precision.HIGH)
    assert policy.precision.heavy_hitters == 0.2
    assert not policy.needs_host


def test_with_lru_the_expert_goes_whose_last_use_is_longest_ago():
    assert (
        POLICIES["dymoe-paper"]().residency.evicts is POLICIES["firm-paper"]().residency.evicts is Eviction.LEAST_RECENT
    )
    table = Table.allocate(1, 6)
    table.evicts[:] = Eviction.LEAST_RECENT
    set_pools(table, {HIGH: [(0, 1, 2)]}, {HIGH: [2]})
    wanted, gone = np.full(1, HIGH, np.int8), []
    for expert in (0, 0, 0, 1, 2, 1, 3):  # expert 0 is used most often
        places = table.begin_step(0, np.array([expert]), wanted)
        gone.append(int(places[0, 0]))
        if gone[-1] >= -1:
            table.keep(0, np.array([expert]), wanted, places)
    assert gone == [-1, -3, -3, -1, 0, -3, 2]


def test_dynaexq_takes_the_top_n_of_each_layer():
    score = np.array([[5.0, 4.0, 3.0, 0.1], [0.4, 0.3, 0.2, 0.1]])
    high = np.array([[False, False, True, True], [False, True, False, False]])
    found = layer_swaps(score, high, np.array([2, 1]), 0.05)
    want = [Swap(4.9, (0, 0), (0, 3)), Swap(1.0, (0, 1), (0, 2)), Swap(0.1, (1, 0), (1, 1))]
    assert [swap[1:] for swap in found] == [swap[1:] for swap in want]
    assert [swap.gain for swap in found] == pytest.approx([swap.gain for swap in want])
    server = dynaexq(STORES[True], 6, hotness="uses", high_set="layer")
    migration = server.host_planned.migration
    assert migration._changes is None, "layers are not compared"
    for _ in range(40):
        server.host_planned.begin_step(Phase.DECODE)
        for layer in range(3):
            ids = torch.tensor([[0, 1], [0, 2]] if layer == 2 else [[4, 5], [4, 5]]).int()
            server.host_planned.forward(Routing(layer, 3, torch.ones(2, 64).bfloat16(), ids, torch.full((2, 2), 0.5)))
        for fetch in list(migration.flying):
            server.engine.wait(fetch.ticket)
    assert (server.cache.table.precision == HIGH).sum(1).tolist() == [2, 2, 2]
    assert {4, 5} == set(np.argwhere(server.cache.table.precision[0] == HIGH).flatten().tolist())
    server.engine.close()


def test_duoserve_needs_the_papers_network(tmp_path):
    with pytest.raises(PolicyOptionError) as caught:
        make_policy(Options(policy="duoserve-paper"))
    assert caught.value.option == "predictor"
    with pytest.raises(ConfigError):
        resolve_options({"policy": "duoserve-paper"}, environment={})
    sizes = ModelIdentity("a model", "", LAYERS, EXPERTS, TOP_K, HIDDEN)
    prefetch = POLICIES["duoserve-paper"]().prefetch
    assert not prefetch.paced
    for architecture in ("paper-shared", "linear"):
        file = trained_on_made_up(sizes, tmp_path / architecture, architecture=architecture)
        model = RoutedModel(LAYERS, EXPERTS, TOP_K, hidden=HIDDEN, predictor=file)
        if architecture == "linear":
            with pytest.raises(PredictorError):
                prefetch.make(model)
        else:
            assert prefetch.make(model).nbytes > 0


def test_firm_searches_as_printed_from_the_ablations_numbers():
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    tuner = POLICIES["firm-paper"]().prefetch.make(RoutedModel(LAYERS, EXPERTS, TOP_K, gates))._tuner
    assert tuner.setting(0) == (3, 3)
    assert tuner.as_printed
    heop, seen = Heop(3, Setting(4, 3), Setting(10, 6), as_printed=True), []
    for _ in range(12 * heop.update_every):
        for layer in range(3):
            heop.record(layer, unused=1, missed=0, hits=0)  # costs never improve
        heop.end_step()
        if not seen or seen[-1] != heop.setting(0):
            seen.append(heop.setting(0))
    moves = [(after.k - before.k, after.p - before.p) for before, after in itertools.pairwise(seen)]
    assert len({move for move in moves if move[0]}) == 1, "K moves one way"
    assert len({move for move in moves if move[1]}) == 1, "and P"
