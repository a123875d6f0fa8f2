"""Every policy: predictions, slots, pace, and refused options."""

from dataclasses import replace

import pytest
import torch

from tests.prefetch.gates import random_gates
from tests.prefetch.made_up import trained_on_made_up
from tests.small_model import make_experts
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import Options
from vllm_dymoe.planner.precision import Precision
from vllm_dymoe.planner.routing import Phase, Routing
from vllm_dymoe.policies import POLICIES, PolicyOptionError, make_policy
from vllm_dymoe.policies.base import PrecisionPolicy
from vllm_dymoe.policies.firm import Firm
from vllm_dymoe.prefetch import RoutedModel
from vllm_dymoe.prefetch.pace import Pace

LAYERS, EXPERTS, HIDDEN, TOP_K = 4, 8, 5, 2


@pytest.fixture(scope="module")
def predictor_file(tmp_path_factory):
    sizes = ModelIdentity("a model", "", LAYERS, EXPERTS, TOP_K, HIDDEN)
    return trained_on_made_up(sizes, tmp_path_factory.mktemp("predictor"))


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_names_experts_of_the_next_layer_or_says_that_it_does_not(name, trained, predictor_file):
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    policy = POLICIES[name]()
    prefetch = policy.prefetch
    if prefetch is None or (trained and not prefetch.takes_predictor) or prefetch.needs_predictor:
        pytest.skip("it has no use for one")
    model = RoutedModel(LAYERS, EXPERTS, TOP_K, gates if prefetch.needs_gates else (), hidden=HIDDEN)
    predictor = prefetch.make(replace(model, predictor=predictor_file) if trained else model)
    assert (predictor.nbytes > 0) == trained
    named = 0
    for tokens, phase in ((6, Phase.PREFILL), (1, Phase.DECODE), (3, Phase.DECODE)):
        for layer in range(LAYERS):
            x = torch.randn(tokens, HIDDEN)
            ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
            predictor.observe(Routing(layer, 9, x, ids, torch.ones(ids.shape), phase))
            candidates = predictor.predict(layer)
            assert all(c.layer == layer + 1 < LAYERS and 0 <= c.expert < EXPERTS for c in candidates)
            assert len({c.expert for c in candidates}) == len(candidates)
            named += len(candidates)
    assert named > 0


def test_heop_begins_with_the_models_experts_per_token_and_the_papers_numbers():
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    tuner = Firm().prefetch.make(RoutedModel(LAYERS, EXPERTS, TOP_K, gates))._tuner
    assert tuner.setting(0) == (2, 3)
    assert (tuner.alpha, tuner.beta, tuner.update_every, tuner.patience, tuner.rounds) == (0.5, 0.5, 10, 2, 20)
    assert tuner.largest == (4, 6)


@pytest.mark.parametrize(
    ("options", "option", "words"),
    [
        ({"policy": "dyna"}, "policy", '"dyna" does not exist; .*on-demand'),
        ({"policy": "dynaexq"}, "policy", "set low to 2, 4 or 8"),
        ({"policy_options": {"k": 3}}, "policy_options", "k: .*it has look_ahead"),
        ({"policy": "firm", "policy_options": {"projections": 4}}, "policy_options", "projections: "),
        ({"policy": "layer-prefetch", "policy_options": {"k": 1}}, "policy_options", "it has none"),
        ({"policy": "dymoe", "policy_options": {"retention": 0}}, "policy", "every expert"),
        ({"policy": "firm", "predictor": "a"}, "predictor", '"firm"'),
        ({"predictor": "a", "policy_options": {"look_ahead": 0}}, "predictor", '"exact"'),
    ],
)
def test_what_cannot_be_is_refused(options, option, words):
    with pytest.raises(PolicyOptionError, match=words) as caught:
        make_policy(Options(**options))
    assert caught.value.option == option
    assert not str(caught.value).endswith(".")


def test_policies_that_keep_nothing_have_slots_for_what_they_need():
    assert {name for name, kind in POLICIES.items() if not kind().residency.keeps} == {
        "on-demand",
        "layer-prefetch",
        "duoserve",
        "duoserve-paper",
    }
    for policy in (kind() for kind in POLICIES.values()):
        assert policy.residency.keeps or policy.staging_slots(100) == 100


def test_one_controller_steers_what_is_fetched_ahead():
    """HEOP tunes FIRM-MoE and MoESys fetches everything, so neither slows down.

    Wrong predictions slow down only the other policies.
    """
    for name, kind in POLICIES.items():
        prefetch = kind().prefetch
        pace = Pace(paid=prefetch is not None and prefetch.paced)
        for _ in range(64):
            if pace.acts():
                pace.spend(0.0)
            pace.judge(False, 1.0)
        assert (pace.interval > 1) == (name in ("exact", "dymoe", "dymoe-paper", "duoserve")), name


def test_a_policy_with_two_precisions_has_to_say_how_many_experts_each_gets():
    with pytest.raises(NotImplementedError, match=r"override shares"):
        PrecisionPolicy(frozenset((Precision.HIGH, Precision.LOW))).all_shares(make_experts())
