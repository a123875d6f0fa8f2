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
    nothing_dense = replace(model.MODELS[0], attention_weights=0, head_weights=0)
    counted = model.token(nothing_dense, model.CARDS[0], 1.0, model.Assumptions(**perfect))
    assert counted.ahead_ms == pytest.approx(counted.bound_ms)
    assert counted.device_ms == pytest.approx(counted.bound_ms)
    assert counted.host_ms == pytest.approx(counted.bound_ms)


def test_what_is_fetched_ahead_is_worth_as_much_as_attention_hides_of_it(model):
    """By hand: half of eight experts are missing, and attention takes as long as the link for one projection."""
    qwen, card = model.MODELS[0], model.CARDS[0]
    expert = 3 * 2048 * 768 * (4 / 8 + 4 / 64)
    weights = expert / 3 / card.link_gbps * card.memory_gbps / 2
    perfect = dict.fromkeys(asdict(model.Assumptions()), 0.0) | {"memory_share": 1.0, "link_share": 1.0}
    assumed = model.Assumptions(**(perfect | {"right_share": 1.0, "dense_bits": 16}))
    hidden = replace(qwen, attention_weights=weights, head_weights=0)
    counted = model.token(hidden, card, 0.5, assumed)
    assert counted.device_ms - counted.ahead_ms == pytest.approx(48 * expert / 3 / card.link_gbps / 1e6)
    wrong = model.token(hidden, card, 0.5, replace(assumed, right_share=0.0))
    assert (wrong.ahead, wrong.ahead_ms) == (0, pytest.approx(wrong.device_ms))


def test_hits_never_fall_with_slots(model):
    rates = list(model.hit_rates(model.MODELS[1].layer, None).values())
    assert rates == sorted(rates)
    assert rates[-1] == 1


def test_the_readme_has_the_assumptions(model):
    text = (FOLDER / "README.md").read_text().split("<!-- counted:begin -->")[1].split("<!-- counted:end -->")[0]
    for name, value in asdict(model.Assumptions()).items():
        assert f"| {name} | {value:g} |" in text
