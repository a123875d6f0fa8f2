import pytest
import torch

from tests.predict.gates import random_gates
from tests.predict.made_up import made_up
from vllm_dymoe.experts.routing import Phase, Routing
from vllm_dymoe.predict import SCHEMES, RoutedModel, make_scheme
from vllm_dymoe.predict.checkpoint import PredictorCard, save_predictor
from vllm_dymoe.predict.expert_mlp import Architecture
from vllm_dymoe.predict.folded import fold
from vllm_dymoe.predict.training import Recipe, train
from vllm_dymoe.traces import TraceHeader

LAYERS, EXPERTS, HIDDEN, TOP_K = 4, 8, 5, 2


@pytest.fixture(scope="module")
def predictor_file(tmp_path_factory):
    sizes = TraceHeader("a model", "", LAYERS, EXPERTS, TOP_K, HIDDEN)
    network = fold(train(made_up(sizes=sizes), Architecture((), history=2), Recipe(epochs=1)).model)
    path = tmp_path_factory.mktemp("predictor") / "file.safetensors"
    save_predictor(path, PredictorCard(sizes), network)
    return path


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_foresees(name, predictor_file):
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    scheme = make_scheme(name, {})
    gates = gates if scheme.needs_gates else ()
    predictor = scheme.build(RoutedModel(LAYERS, EXPERTS, TOP_K, gates, hidden=HIDDEN, predictor=predictor_file))
    if name == "none":
        assert predictor is None
        return
    named = 0
    for tokens, phase in ((6, Phase.PREFILL), (1, Phase.DECODE), (3, Phase.DECODE)):
        for layer in range(LAYERS):
            x = torch.randn(tokens, HIDDEN)
            ids = torch.rand(tokens, EXPERTS).topk(TOP_K).indices.int()
            predictor.observe(Routing(layer, 9, x, ids, torch.ones(ids.shape), phase))
            candidates = predictor.predict(layer)
            assert all(c.layer == layer + 1 < LAYERS and 0 <= c.expert < EXPERTS for c in candidates)
            assert len({c.expert for c in candidates}) == len(candidates)
            assert [c.score for c in candidates] == sorted((c.score for c in candidates), reverse=True)
            named += len(candidates)
    assert named > 0


def test_firms_parameters_reach_its_parts():
    gates, _ = random_gates(LAYERS, EXPERTS, HIDDEN)
    scheme = make_scheme("meeting-of-layers", {"k": 3, "p": 2, "tune": False})
    predictor = scheme.build(RoutedModel(LAYERS, EXPERTS, TOP_K, gates))
    assert (predictor._setting, predictor._tuner) == ((3, 2), None)
    scheme = make_scheme("meeting-of-layers", {"k": 3, "alpha": 0.25, "update_every": 7, "rounds": 9})
    tuner = scheme.build(RoutedModel(LAYERS, EXPERTS, TOP_K, gates))._tuner
    assert tuner.setting(0) == (3, 3)
    assert (tuner._alpha, tuner._beta, tuner._update_every, tuner._patience, tuner._rounds) == (0.25, 0.5, 7, 2, 9)
    assert tuner._largest == (4, 6)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("next-game", {}, '"next-game" does not exist; choose one of none, layer, popularity, next-gate'),
        ("next-gate", {"k": 3}, "k: extra inputs are not permitted.*it has decode_experts, prefill_experts"),
        ("meeting-of-layers", {"p": 0}, "p: input should be greater than 0"),
        ("layer", {"k": 1}, "it has none"),
    ],
)
def test_what_cannot_be_is_refused(name, parameters, words):
    with pytest.raises(ValueError, match=words):
        make_scheme(name, parameters)
