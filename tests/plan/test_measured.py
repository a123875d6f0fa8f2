"""Plans against rows that were measured on a quiet machine."""

import pytest

from tests.support.benchmarks import modules_of
from vllm_dymoe.plan.errors import median_error, reversed_rankings


@pytest.fixture(scope="module")
def found():
    with modules_of("plan") as folder:
        from plan_errors import compared

        yield compared(), (folder / "README.md").read_text()


def test_a_plan_is_near_what_was_measured_and_ranks_systems_alike(found):
    rows, readme = found
    assert len(rows) == 25
    assert median_error(rows) < 0.15
    assert not reversed_rankings(rows)
    assert f"{len(rows)} rows, median error {median_error(rows):.1%}, 0 rankings reversed" in readme
