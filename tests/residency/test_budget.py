"""The byte budget is hard."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.residency.budget import BudgetError, BudgetTracker


@given(st.lists(st.integers(0, 60), max_size=20))
def test_no_sequence_exceeds_the_limit_and_a_refusal_changes_nothing(sizes):
    budget, taken = BudgetTracker(100), 0
    for nbytes in sizes:
        if taken + nbytes > 100:
            with pytest.raises(BudgetError, match=f"needs {nbytes} bytes, but only {100 - taken} of"):
                budget.reserve("slots", nbytes)
        else:
            budget.reserve("slots", nbytes)
            taken += nbytes
        assert budget.reserved == taken <= 100
