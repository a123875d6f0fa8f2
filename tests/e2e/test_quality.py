"""benchmarks/quality with a real engine."""

import pytest

from tests.e2e.engines import in_own_process
from tests.support.benchmarks import modules_of

pytestmark = pytest.mark.engine


def measured():
    with modules_of("quality"):
        from quality import Measurement, dymoe, nested, uniform

        measurement = Measurement(1, 2)
        four = measurement.read(uniform(4))
        return four, measurement.read(nested(dymoe(0.5, 2)), decode=True, share=0.5)


def test_it_runs_and_finds_that_fewer_bits_lose_more():
    """Measure in a process of its own, since its engine stays.

    The benchmark once stopped working without an error.
    """
    four, both = in_own_process(measured)
    assert 0 < four["kl_nats"] < 0.005
    assert 0 < four["kl_nats"] < both["kl_nats"]
    assert both["moved_bytes_per_token"] > 0
