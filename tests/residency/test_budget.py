"""The byte budget is hard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.residency.budget import BudgetError, BudgetTracker


def test_reserving_too_much_is_refused_and_changes_nothing():
    budget = BudgetTracker(100)
    budget.reserve("a", 60)
    with pytest.raises(BudgetError, match="needs 41 bytes, but only 40"):
        budget.reserve("b", 41)
    assert (budget.reserved, budget.available, budget.peak) == (60, 40, 60)
    budget.reserve("b", 40)
    budget.release("a")
    assert (budget.reserved, budget.peak) == (40, 100)


def test_a_name_holds_one_reservation():
    budget = BudgetTracker(100)
    budget.reserve("a", 1)
    with pytest.raises(BudgetError, match="already"):
        budget.reserve("a", 1)
    with pytest.raises(ValueError, match="cannot reserve -1"):
        budget.reserve("b", -1)
    with pytest.raises(KeyError):
        budget.release("b")


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=40))
def test_no_sequence_exceeds_the_limit(steps):
    """Each step reserves for a name, or releases it if it holds something; a dictionary is the naive model."""
    budget, model, peak = BudgetTracker(100), {}, 0
    for name, nbytes in steps:
        if name in model:
            budget.release(str(name))
            del model[name]
        elif sum(model.values()) + nbytes <= 100:
            budget.reserve(str(name), nbytes)
            model[name] = nbytes
        else:
            with pytest.raises(BudgetError):
                budget.reserve(str(name), nbytes)
        peak = max(peak, sum(model.values()))
        assert budget.reserved == sum(model.values()) <= 100
    assert budget.peak == peak
