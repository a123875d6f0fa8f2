"""The count of a decode step: its bytes by hand, and what must hold whatever is assumed."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def model(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(FOLDER))
    import decode_model

    return decode_model


def test_bytes_of_a_token_by_hand(model):
    """Half of eight experts of 48 layers, 2048 x 768 at 4 bits with 4 bytes for 64 weights, three of each expert."""
    qwen, card = model.MODELS[0], model.CARDS[0]
    counted = model.token(qwen, card, 0.5, model.Assumptions())
    expert = 3 * 2048 * 768 * (4 / 8 + 4 / 64)
    assert counted.misses == 48 * 4
    assert counted.link_bytes == 48 * 4 * expert
    assert counted.memory_bytes == 48 * 8 * expert + 2 * qwen.dense_weights
    assert counted.bound_ms == pytest.approx(counted.link_bytes / 25e6)


def test_without_overheads_and_waits_the_bound_is_reached(model):
    """Everything there, nothing but experts: what is left of the time is the bound."""
    perfect = dict.fromkeys(asdict(model.Assumptions()), 0.0) | {"memory_share": 1.0, "link_share": 1.0}
    counted = model.token(replace(model.MODELS[0], dense_weights=0), model.CARDS[0], 1.0, model.Assumptions(**perfect))
    assert counted.device_ms == pytest.approx(counted.bound_ms)
    assert counted.host_ms == pytest.approx(counted.bound_ms)


def test_hits_never_fall_with_slots(model):
    rates = list(model.hit_rates(model.MODELS[1].layer, None).values())
    assert rates == sorted(rates)
    assert rates[-1] == 1


def test_the_readme_has_the_assumptions(model):
    text = (FOLDER / "README.md").read_text().split("<!-- counted:begin -->")[1].split("<!-- counted:end -->")[0]
    for name, value in asdict(model.Assumptions()).items():
        assert f"| {name} | {value:g} |" in text
