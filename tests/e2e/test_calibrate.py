"""Calibration in a real engine: what is recorded, resuming, and GPTQ's use of it."""

import pytest
import torch
from safetensors import safe_open

from tests.e2e.engines import MODEL, engine, server_of
from vllm_dymoe import calibrate
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.recording import CalibrationError
from vllm_dymoe.vllm_plugin import offline as calibrating

pytestmark = pytest.mark.engine

LAYERS, EXPERTS, TOP_K, HIDDEN = 8, 32, 4, 256
TOKENS, LENGTH, PART = 600, 100, 250


def texts():
    return [(MODEL / "heldout" / f"{name}.txt").read_text()[6000:16000] for name in ("docs", "code")]


@pytest.fixture(scope="module")
def llm():
    # Prefix caching would skip tokens that were read before. A step is smaller than a part of the recording.
    with engine(
        dymoe={"high": 16, "expert_budget": "50%"}, enable_prefix_caching=True, max_num_batched_tokens=128
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(calibrating, "PART_TOKENS", PART)


def run(llm, out, progress=lambda done, total: None):
    return calibrate(llm, texts(), out, tokens=TOKENS, length=LENGTH, progress=progress)


@pytest.fixture(scope="module")
def recorded(llm, tmp_path_factory):
    """Calibrate; return the calibration and the server's own records of it.

    These are inputs, weights and experts, by layer.
    """
    server, seen = server_of(llm), [([], [], []) for _ in range(LAYERS)]
    original = server.host_planned.forward

    def forward(routing, activation):
        for kind, values in zip(seen[routing.layer], (routing.x, routing.weights, routing.ids), strict=True):
            kind.append(values.clone())
        return original(routing, activation)

    out = tmp_path_factory.mktemp("calibration")
    server.host_planned.forward = forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrating, "PART_TOKENS", PART)
        try:
            recording = run(llm, out)
        finally:
            del server.host_planned.forward
    return out, recording, [tuple(torch.cat(rows) for rows in layer) for layer in seen]


def test_what_is_recorded_is_what_the_experts_read(recorded):
    out, recording, seen = recorded
    assert (recording.layers, recording.num_experts, recording.top_k) == (tuple(range(LAYERS)), EXPERTS, TOP_K)
    assert len(recording.parts) > 1
    found = Calibration(out)
    for layer, (x, shares, ids) in enumerate(seen):
        assert len(x) == sum(recording.parts), "every token once, and no other"
        expert = int(torch.bincount(ids.flatten().long(), minlength=EXPERTS).argmax())
        assert int(found.tokens(layer)[expert]) == int((ids == expert).sum())
        rows, weights = (torch.cat(parts) for parts in zip(*found.inputs(layer, expert), strict=True))
        assert torch.equal(rows, x[(ids == expert).any(1)].to(rows.dtype))
        assert torch.equal(weights.flatten(), shares[ids == expert].to(weights.dtype))


def test_a_run_that_was_ended_goes_on_and_gives_the_same_bytes(llm, recorded, tmp_path, monkeypatch):
    whole, recording, _ = recorded
    out, asked = tmp_path / "out", []

    def ended(done, total):
        if done == sum(recording.parts[:1]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(llm, out, ended)
    assert recording.missing(out) == list(range(1, len(recording.parts)))
    # Stop in the middle of a part: its first step is recorded, and the rest is never requested.
    model = llm.llm_engine.vllm_config.quant_config.loaded_model()
    model.observation.record(recording.part(out, 1), recording.parts[1])
    llm.generate({"prompt_token_ids": list(range(5, 50))}, use_tqdm=False)
    assert recording.missing(out) == list(range(1, len(recording.parts)))
    original = calibrating._ask
    monkeypatch.setattr(calibrating, "_ask", lambda llm, *call: (asked.append(call), original(llm, *call)))
    again = run(llm, out)
    assert again == recording
    assert len(asked) == 2 * (len(recording.parts) - 1), "what was complete is not computed again"
    for part in range(len(recording.parts)):
        assert recording.part(out, part).read_bytes() == recording.part(whole, part).read_bytes()
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in whole.iterdir())


def test_another_calibration_is_not_mixed_in_and_recording_costs_nothing_when_it_is_over(llm, recorded):
    out, recording, _ = recorded
    with pytest.raises(CalibrationError, match="other texts"):
        calibrate(llm, ["another text " * 50], out, tokens=TOKENS, length=LENGTH)
    model = llm.llm_engine.vllm_config.quant_config.loaded_model()
    assert model.observation.observers == ()
    with safe_open(recording.part(out, 0), framework="pt") as file:
        assert len(file.keys()) == 3 * LAYERS
