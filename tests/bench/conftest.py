"""Systems that only benchmarks know are known to no other test."""

import pytest

from vllm_dymoe.bench.systems import make_known
from vllm_dymoe.systems import SYSTEMS


@pytest.fixture(autouse=True)
def known_systems():
    before = dict(SYSTEMS)
    make_known()
    yield
    SYSTEMS.clear()
    SYSTEMS.update(before)
