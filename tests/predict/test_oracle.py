import torch

from vllm_dymoe.predict import Measured
from vllm_dymoe.predict.oracle import Oracle
from vllm_dymoe.residency.routing import Phase, Routing

X = torch.zeros(1, 1)


def run(predictor, routes):
    """A run of several steps; what was named in each."""
    named = []
    for step in routes:
        for layer, ids in enumerate(step):
            predictor.observe(Routing(layer, 9, X, ids, torch.ones(ids.shape), Phase.DECODE))
            named.append(predictor.predict(layer))
    return named


def random_routes(steps=6, layers=4, tokens=1, top_k=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.rand(tokens, 9, generator=generator).topk(top_k).indices for _ in range(layers)] for _ in range(steps)
    ]


def test_it_is_always_right_the_second_time():
    oracle, routes = Oracle(), random_routes() + random_routes(tokens=5, seed=1)
    assert not any(run(oracle, routes))
    oracle.rewind()
    watched = Measured(oracle)
    run(watched, routes)
    assert watched.stats.accuracy == watched.stats.utilisation == 1
    assert watched.stats.wanted > 100


def test_it_looks_as_far_ahead_as_it_is_asked_to():
    oracle, routes = Oracle(ahead=2), random_routes()
    run(oracle, routes)
    oracle.rewind()
    for place, candidates in enumerate(run(oracle, routes)):
        step, layer = divmod(place, 4)
        expected = {
            (later, expert)
            for later in range(layer + 1, min(layer + 3, 4))
            for expert in routes[step][later][0].tolist()
        }
        assert {(candidate.layer, candidate.expert) for candidate in candidates} == expected
        assert [c.layer for c in candidates] == sorted(c.layer for c in candidates)
        assert [c.score for c in candidates] == sorted((c.score for c in candidates), reverse=True)
