"""Plans against rows that were measured on a quiet machine."""

import json

import pytest

from tests.support.benchmarks import modules_of
from vllm_dymoe.plan.errors import median_error, reversed_rankings


@pytest.fixture(scope="module")
def found():
    with modules_of("plan") as folder:
        from plan_errors import compared, said

        rows = compared(json.loads((folder / "results.json").read_text()))
        yield rows, said, (folder / "README.md").read_text()


def test_a_plan_is_near_what_was_measured_and_ranks_systems_alike(found):
    models, said, readme = found
    everything = [row for rows in models.values() for row in rows]
    assert set(models) == {"shipped", "random"}
    assert len(everything) == 30
    assert median_error(everything) < 0.15
    for rows in models.values():
        assert not reversed_rankings(rows)
    assert said("Both models", everything) in readme
