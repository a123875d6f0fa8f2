"""benchmarks/pace: the default is never slower than none, and uses link time that is idle."""

from types import SimpleNamespace

import pytest

from tests.support.benchmarks import modules_of

TOKENS = 48


@pytest.fixture(scope="module")
def pace():
    with modules_of("pace"):
        import pace

        yield pace


@pytest.mark.parametrize(("rate", "ask_us", "least"), [(25e6, 250, 1.1), (100e6, 250, 1.1), (100e6, 1500, 0.98)])
def test_what_is_asked_while_the_link_works_is_free_and_what_is_not_has_to_pay(pace, rate, ask_us, least):
    """In virtual time: as many milliseconds on every machine."""
    plan = SimpleNamespace(ask_us=ask_us, layer_us=750, expert_us=40)
    store, routing = pace.make_store(), pace.make_routing(TOKENS + pace.WARM_UP)
    none = pace.serve(store, rate, 0.25, None, plan, routing)
    ours = pace.serve(store, rate, 0.25, 0.8, plan, routing)
    assert none["ms_per_token"] / ours["ms_per_token"] > least
    assert none["bound_ms_per_token"] < none["ms_per_token"]
