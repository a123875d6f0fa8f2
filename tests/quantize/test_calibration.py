"""Uses of recorded inputs: Hessians of experts, token counts and thresholds."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.quantize.recordings import write_recording
from tests.small_model import make_experts, random_weight
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.kernels import Activation
from vllm_dymoe.planner.threshold import above, threshold_for
from vllm_dymoe.quantize import calibration as calibrating
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.recording import CalibrationError

EXPERTS = make_experts(top_k=2)
HIDDEN = 64
RARE = 3


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    _, inputs, routed = write_recording(
        folder, layers=EXPERTS.layers, num_experts=6, top_k=2, hidden=HIDDEN, rare=(RARE,)
    )
    return folder, inputs, routed


def matrices(layer, expert, *, bias=False):
    weights = {projection: random_weight(EXPERTS, layer, expert, projection) for projection in Projection}
    return {p: (weight, torch.linspace(-1, 1, len(weight)) if bias else None) for p, weight in weights.items()}


def routed(recorded, layer, expert):
    """Return an expert's routed inputs and weights, both float64.

    Their shapes are [tokens, hidden] and [tokens, 1].
    """
    _, inputs, routing = recorded
    weights, experts = routing[layer]
    rows = (experts == expert).any(1)
    return inputs[layer][rows].double(), weights[experts == expert].double().unsqueeze(1)


def hessian(inputs, weights):
    """Compute the Hessian by definition, a sum over tokens."""
    return torch.einsum("ti,tj,t->ij", inputs, inputs, weights.flatten().square())


def inner_inputs(x, found, activation):
    """Compute the input of the down projection by definition."""
    (gate, gate_bias), (up, up_bias) = (
        tuple(None if part is None else part.double() for part in found[projection])
        for projection in (Projection.GATE, Projection.UP)
    )
    return activation.gated(F.linear(x, gate, gate_bias), F.linear(x, up, up_bias))


def assert_close(found, expected):
    # The bound is for float32 sums of a few hundred products, against float64.
    assert (found.double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("chunk", [4096, 50])
@pytest.mark.parametrize("bias", [False, True])
def test_hessians_are_those_of_the_routed_inputs(recorded, chunk, bias, monkeypatch):
    monkeypatch.setattr(calibrating, "_CHUNK", chunk)
    found = Calibration(recorded[0])
    for layer, expert in ((0, 0), (1, 5)):
        weights = matrices(layer, expert, bias=bias)
        outer, inner = found.curvatures(layer, expert, weights)
        x, shares = routed(recorded, layer, expert)
        assert len(x) > HIDDEN
        assert_close(outer.hessian, hessian(x, shares))
        assert_close(inner.hessian, hessian(inner_inputs(x, weights, Activation.SILU), shares))


def test_the_activation_is_the_recorded_one(tmp_path):
    recorded = (
        tmp_path,
        *write_recording(tmp_path, layers=(0,), num_experts=6, top_k=2, hidden=HIDDEN, activation="swiglu_oai")[1:],
    )
    weights = matrices(0, 2, bias=True)
    _, inner = Calibration(tmp_path).curvatures(0, 2, weights)
    x, shares = routed(recorded, 0, 2)
    assert_close(inner.hessian, hessian(inner_inputs(x, weights, Activation.SWIGLU_OAI), shares))


def test_tokens_of_each_expert(recorded):
    counts = Calibration(recorded[0]).tokens(1).tolist()
    assert counts == [len(routed(recorded, 1, expert)[0]) for expert in range(6)]
    assert counts[RARE] == 1
    assert Calibration(recorded[0]).rare(1) == [expert for expert, seen in enumerate(counts) if seen < HIDDEN]


@pytest.mark.parametrize("retention", [0.3, 0.5, 0.75])
def test_thresholds_begin_where_the_calibrations_routers_hold_retention(recorded, retention):
    prompts, tokens = Calibration(recorded[0]).curves()
    found = ([], [])
    for weights, experts in recorded[2]:
        for rows in torch.arange(500).split([300, 200]):
            sums = torch.zeros(6).index_add_(0, experts[rows].flatten(), weights[rows].flatten())
            found[0].append(sums[sums > 0])
        found[1].extend(weights)
    # Shares are coarse: prompts use 24 experts in all, and one of a token's two experts is always high.
    for curve, shares, wanted, off in zip(
        (prompts, tokens), found, (retention, max(retention, 0.5)), (1 / 12, 0.03), strict=True
    ):
        units = [(row * 2**30).long().numpy() for row in shares]
        high = [above(threshold_for(retention, curve), row).mean() for row in units]
        assert np.mean(high) == pytest.approx(wanted, abs=off)
    assert abs(np.mean([above(threshold_for(0.9), row).mean() for row in units]) - 0.9) > 0.03, "uncalibrated is off"


def test_inputs_that_are_not_finite_name_the_expert(recorded):
    found = Calibration(recorded[0])
    weights = matrices(0, 0)
    weights[Projection.GATE][0][0, 0] = torch.inf
    with pytest.raises(CalibrationError, match=r"expert 0 in layer 1: inputs are NaN"):
        found.curvatures(0, 0, weights)


def test_what_is_not_a_calibration_of_this_model_is_refused(recorded, tmp_path):
    folder, *_ = recorded
    found = Calibration(folder)
    found.check_belongs("0123", EXPERTS)
    with pytest.raises(CalibrationError, match="another model"):
        found.check_belongs("89ab", EXPERTS)
    with pytest.raises(CalibrationError, match="another model"):
        found.check_belongs("0123", make_experts(num_experts=7))
    recording, _, _ = write_recording(tmp_path, layers=(1, 2), num_experts=6, top_k=2, hidden=HIDDEN)
    part = recording.part(tmp_path, 1)
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(CalibrationError, match="part-00001"):
        Calibration(tmp_path)
    part.unlink()
    with pytest.raises(CalibrationError, match="lacks 1 of 2 parts"):
        Calibration(tmp_path)
