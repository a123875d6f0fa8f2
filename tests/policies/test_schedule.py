"""Eqs. 4 and 5: the schedule's average, and the effect of rounding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.schedule import Schedule


@given(st.floats(0, 1), st.integers(1, 100))
def test_the_average_over_the_layers_is_the_retention(retention, layers):
    schedule = Schedule(retention)
    ratios = [schedule.ratio(layer, layers) for layer in range(layers)]
    assert sum(ratios) / layers == pytest.approx(retention, abs=1e-12)
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert ratios == sorted(ratios, reverse=True)


@pytest.mark.parametrize(("retention", "floor"), [(1.0, 1.0), (0.9, 0.8), (0.75, 0.5), (0.5, 0.0)])
def test_the_paper_s_ends(retention, floor):
    """Eq. 4 falls from 1 in the first layer to lambda = 2r - 1 in the last."""
    schedule = Schedule(retention)
    assert schedule.ratio(0, 32) == 1
    assert schedule.ratio(31, 32) == pytest.approx(floor)
    assert schedule.ratio(10, 21) == pytest.approx((1 + floor) / 2), "the middle of a cosine"


@pytest.mark.parametrize("stages", [(8,), (3, 5), (1, 0, 1, 6)])
def test_stages_of_a_pipeline_count_through(stages):
    whole, found = Dymoe(retention=0.6, high_by="depth"), []
    # This comes first, so that a stage cannot have kept the result.
    expected = whole.precision.critical_counts(8, 16).tolist()
    for number, layers in enumerate(stages):
        stage = whole.of_stage(sum(stages[:number]), sum(stages[number + 1 :]))
        assert stage.high_by == "depth"
        found += stage.precision.critical_counts(layers, 16).tolist()
    assert found == expected


def test_below_a_half_the_curve_is_scaled():
    assert Schedule(0.25).ratio(0, 8) == pytest.approx(0.5)
    assert Schedule(0.25).ratio(7, 8) == 0
    assert Schedule(0.0).ratio(0, 8) == 0


def test_the_ceiling_of_the_paper():
    schedule = Schedule(0.75)
    # r(l) of eight layers: 1, 0.975, 0.906, 0.806, 0.694, 0.594, 0.525, 0.5
    assert [schedule.critical(layer, 8, 4) for layer in range(8)] == [4, 4, 4, 4, 3, 3, 3, 2]
    assert [schedule.critical(layer, 8, 32) for layer in range(8)] == [32, 32, 29, 26, 23, 20, 17, 16]
    # With Mixtral's two active experts the ceiling leaves both high, except in the last layer.
    assert [schedule.critical(layer, 32, 2) for layer in range(32)] == [2] * 31 + [1]


@pytest.mark.parametrize(("layers", "active", "error"), [(32, 2, 1e-9), (8, 4, 0.04)])
def test_rounding_to_the_nearest_keeps_the_average(layers, active, error):
    schedule = Schedule(0.75, "nearest")
    critical = sum(schedule.critical(layer, layers, active) for layer in range(layers))
    assert critical / (layers * active) == pytest.approx(0.75, abs=error)


@given(st.floats(0, 1), st.integers(1, 60), st.integers(1, 200), st.sampled_from(["up", "nearest"]))
def test_critical_experts_are_some_of_the_active_ones(retention, layers, active, rounding):
    schedule = Schedule(retention, rounding)
    counts = [schedule.critical(layer, layers, active) for layer in range(layers)]
    assert all(0 <= count <= active for count in counts)
    assert counts == sorted(counts, reverse=True)
    if retention == 1:
        assert set(counts) == {active}
    if retention == 0:
        assert set(counts) == {0}


def test_what_floating_point_leaves_of_a_whole_number_is_not_rounded_up():
    # The last layer gets 0.8 * 10. Differences such as 1 - 0.9 are not exact.
    assert Schedule(0.9).critical(7, 8, 10) == 8
    assert Schedule(0.55).critical(7, 8, 10) == 1


@pytest.mark.parametrize("retention", [-0.1, 1.1])
def test_a_retention_that_is_no_share_is_refused(retention):
    with pytest.raises(ValueError, match="from 0 to 1"):
        Schedule(retention)
