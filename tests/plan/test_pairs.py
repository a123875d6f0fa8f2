"""The choices for eight models on eight machines, compared with the best possible."""

import json

import pytest

from tests.plan.starts.pairs import CHOSEN, PAIRS, chosen, times_best


@pytest.fixture(scope="module")
def committed():
    return json.loads(CHOSEN.read_text())


def test_there_are_eight_pairs_of_different_machines(committed):
    assert committed.keys() == PAIRS.keys()
    assert len(PAIRS) == 8


@pytest.mark.parametrize("machine", PAIRS)
def test_what_is_chosen_is_what_is_committed(machine, committed):
    """After an intended change, run python -m tests.plan.starts.pairs."""
    found, before = chosen(machine), committed[machine]
    for speed in ("tokens_per_second", "ttft"):
        assert found.pop(speed) == pytest.approx(before.pop(speed), rel=0.02)
    assert found["options"].keys() == before["options"].keys()
    assert {name: found[name] for name in ("model", "arguments")} == {
        name: before[name] for name in ("model", "arguments")
    }
    assert [(subject, what) for subject, (what, _) in found["why"].items()] == [
        (subject, what) for subject, (what, _) in before["why"].items()
    ]


def test_each_is_within_a_twentieth_of_the_best_of_all(committed):
    """The command that wrote the table compared all candidates.

    The test repeats this for one machine.
    """
    assert all(1 <= found["times_best"] <= 1.05 for found in committed.values())
    assert times_best("rtx4060ti-laptop") == pytest.approx(committed["rtx4060ti-laptop"]["times_best"], abs=0.005)
