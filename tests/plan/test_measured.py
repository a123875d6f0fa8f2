"""Plans against rows that were measured on a quiet machine."""

import json

import pytest

from tests.support.benchmarks import modules_of
from vllm_dymoe.plan.errors import Compared, median_error


@pytest.fixture(scope="module")
def found():
    with modules_of("plan") as folder:
        import plan_errors

        yield plan_errors, json.loads((folder / "results.json").read_text()), (folder / "README.md").read_text()


def test_a_plan_is_near_what_was_measured_and_ranks_systems_alike(found):
    plan_errors, results, readme = found
    models = plan_errors.compared(results)
    everything = [row for rows in models.values() for row in rows]
    assert set(models) == {"shipped", "random"}
    assert len(everything) == 18 + 6
    assert median_error(everything) < 0.15
    for name, rows in models.items():
        assert not plan_errors.reversed_in_both(rows, results[name])
    assert plan_errors.said("Both models", everything) in readme


def test_a_ranking_is_reversed_where_both_runs_say_so(found):
    plan_errors, _, _ = found

    def reversed_(fast, slow):
        rows = [{"kind": "speed", "label": label, "budget": "25%", "options": {"link_gbps": 0.02},
                 "measured": {"tpot_ms": {"runs": runs}}} for label, runs in (("a", fast), ("b", slow))]  # fmt: skip
        predicted = [Compared("a", "25%", 1, 2e7, 0.03, min(fast) / 1e3), Compared("b", "25%", 1, 2e7, 0.02, 1.0)]
        return plan_errors.reversed_in_both(predicted, rows)

    assert reversed_([10.0, 12.0], [20.0, 15.0]) == {("a", "b", "25%", 2e7)}
    assert not reversed_([10.0, 14.0], [20.0, 15.0])
