import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.prefetch import Candidate, Measured, Predictor

X = torch.zeros(1, 1)
LAYERS = 4
SETS = st.frozensets(st.integers(0, 7), max_size=6)


class Scripted(Predictor):
    """Predicts what the test sets."""

    def __init__(self):
        self.next = []

    def observe(self, routing):
        self.seen = routing.layer

    def predict(self, layer):
        return self.next


def observe(predictor, layer, experts):
    ids = torch.tensor([sorted(experts)], dtype=torch.int32).reshape(1, -1)
    predictor.observe(Routing(layer, LAYERS, X, ids, torch.ones(ids.shape)))


@given(st.lists(st.lists(st.tuples(SETS, SETS), min_size=LAYERS, max_size=LAYERS), max_size=5))
def test_counts_are_those_of_equations_7_and_8(steps):
    """Compare with counts made directly from predictions and used experts."""
    script = Scripted()
    watched = Measured(script)
    named = wanted = right = 0
    for step in steps:
        expected = None
        for layer, (prediction, active) in enumerate(step):
            observe(watched, layer, active)
            assert script.seen == layer
            if expected is not None:
                named, wanted, right = named + len(expected), wanted + len(active), right + len(expected & active)
            script.next = [Candidate(layer + 1, expert) for expert in prediction] if layer + 1 < LAYERS else []
            assert watched.predict(layer) == script.next
            expected = prediction
    stats = watched.stats
    assert (stats.predicted, stats.needed, stats.correct) == (named, wanted, right)


def test_a_step_that_broke_off_leaves_nothing():
    script = Scripted()
    watched = Measured(script)
    script.next = [Candidate(1, 3)]
    observe(watched, 0, {1})
    watched.predict(0)  # the step ends here, with an error
    observe(watched, 0, {1})
    observe(watched, 1, {3})
    assert watched.stats.predicted == 0
