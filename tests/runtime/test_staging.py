"""The number of staging slots, in the virtual time of a GPU, which is the same on every machine."""

import pytest

from tests.support.benchmarks import modules_of

LAYERS = 4
STEPS = [24, 24, *[1] * 8]


@pytest.fixture(scope="module")
def served():
    with modules_of("staging"):
        import staging

        store, routing = staging.make_store(LAYERS), staging.make_routing(LAYERS, STEPS)
        yield lambda slots, share=0.25: staging.serve(store, slots, share, 300e-6, 0.85, STEPS, routing)


def test_the_default_keeps_the_link_busier_than_two_slots(served):
    chosen, two = served(None), served(2)
    assert chosen["slots"] == 4
    assert chosen["decode_ms"] < 0.95 * two["decode_ms"]
    assert chosen["prefill_link_used"] > two["prefill_link_used"]


def test_a_small_budget_is_no_slower_than_with_two(served):
    chosen, two = served(None, share=0.04), served(2, share=0.04)  # 20 slots in all
    assert chosen["slots"] == 2
    assert chosen["decode_ms"] == two["decode_ms"]


def test_time_is_virtual(served):
    assert served(3) == served(3)
