"""``vllm-dymoe quantize --quantizer e8``: what it makes of a calibration, reports and refuses."""

import json

import pytest
import torch

from tests.cli.checkpoints import EXPERTS, command, quantized, refused, sections
from tests.cli.test_gptq import RARE, make
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.residency.format import Projection
from vllm_dymoe.store import Manifest


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("e8"))


@pytest.mark.parametrize("tiers", [(4, 2), (2, 0)])
def test_the_low_reading_loses_less_than_gptqs_at_more_bytes(made, tmp_path, tiers):
    model, calibration, *_ = made
    errors = {}
    for quantizer in ("e8", "gptq"):
        out = tmp_path / quantizer
        options = "--hi", tiers[0], "--lo", tiers[1], "--quantizer", quantizer, "--calibration", calibration
        said = quantized(model, out, *options)
        errors[quantizer] = Manifest.read(out).errors
        if quantizer == "e8":
            assert "were quantized with what their layers read" in said
    for bits in (some for some in tiers if some):
        for ours, theirs in zip(errors["e8"].output[bits], errors["gptq"].output[bits], strict=True):
            assert ours < theirs * (0.9 if bits == 2 else 1.7)
    record = errors["e8"]
    assert record.fallbacks == ((RARE,),) * 2
    for layer in record.experts[2]:
        assert len(layer) == EXPERTS
        assert all(0 < lost < 1e3 for lost in layer)
    sizes = {name: Manifest.read(tmp_path / name).experts.stored_nbytes for name in errors}
    assert sizes["e8"] < sizes["gptq"]


def test_what_an_expert_loses_is_measured_from_its_own_inputs(made, tmp_path):
    """The low reading's errors of an expert, straight from what the calibration recorded."""
    model, calibration, *_ = made
    out = tmp_path / "out"
    quantized(model, out, "--hi", 4, "--lo", 2, "--quantizer", "e8", "--calibration", calibration)
    record, found = Manifest.read(out).errors, Calibration(calibration)
    expert = next(number for number in range(EXPERTS) if number != RARE)
    low = {place: dequantize(matrix.view(section)) for place, matrix, section in sections(out, 2)}
    layer = 0
    weights = {p: model.experts[layer, expert, p].float() for p in Projection}
    x, r = (torch.cat(parts) for parts in zip(*found.inputs(0, expert), strict=True))
    gated = found.recording.activation_of(layer).gated
    inner = gated(x @ weights[Projection.GATE].t(), x @ weights[Projection.UP].t())
    lost = 0.0
    for projection, weight in weights.items():
        seen = (inner if projection is Projection.DOWN else x) * r
        whole = (seen @ weight.t()).square().sum()
        lost += (seen @ (low[layer, expert, projection] - weight).t()).square().sum() / whole
    assert record.experts[2][0][expert] == pytest.approx(float(lost * whole / r.square().sum()), rel=2e-3)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--hi", 4, "--lo", 2, "--quantizer", "e8"), "e8 needs --calibration"),
        (("--hi", 8, "--lo", 4, "--quantizer", "e8"), "set hi to 4 and lo to 2, or hi to 2 and lo to 0"),
        (("--hi", 4, "--quantizer", "e8"), "set hi to 4 and lo to 2, or hi to 2 and lo to 0"),
    ],
)
def test_what_cannot_be_is_refused(made, tmp_path, options, sentence):
    model, *_ = made
    assert sentence in refused("quantize", model.folder, "-o", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_inspect_shows_the_codes(made, tmp_path):
    model, calibration, *_ = made
    out = tmp_path / "out"
    quantized(model, out, "--hi", 2, "--quantizer", "e8", "--calibration", calibration)
    assert json.loads(command("inspect", out, "--json", "--verify").stdout)["quantizer"] == "e8"
    assert json.loads((out / "config.json").read_text())["quantization_config"]["codebooks"] == {"2": "e8"}
