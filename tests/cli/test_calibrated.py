"""``vllm-dymoe quantize --calibration``: GPTQ, lattice codes, report, refusals."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests.cli.checkpoints import EXPERTS, HIDDEN, MOE_LAYERS, TOP_K, command, make_model, quantized, refused, sections
from tests.quantize.recordings import write_recording
from vllm_dymoe.cache.store import Manifest, StoreError
from vllm_dymoe.experts.format import Projection
from vllm_dymoe.kernels import dequantize
from vllm_dymoe.quantize import QUANTIZERS, packer, quantize_matrix
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.gptq import quantize_gptq
from vllm_dymoe.quantize.quantizers import pack_bias
from vllm_dymoe.quantize.tensors import CheckpointError

RARE = 1


def make(folder, style="separate"):
    """Return a model, its calibration, and the inputs of its experts."""
    model = make_model(folder / "model", style)
    model.save()
    found = Checkpoint.open(model.folder)
    described = {"layers": MOE_LAYERS, "num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN}
    _, inputs, routing = write_recording(
        folder / "calibration", model=found.fingerprint(), parts=(400, 300), rare=(RARE,), **described
    )
    return model, folder / "calibration", inputs, routing


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("gptq"))


@pytest.mark.parametrize("style", ["separate", "fused", "gpt-oss"])
def test_experts_are_what_gptq_makes_of_them_and_rare_ones_what_hqq_does(tmp_path, style):
    model, calibration, *_ = make(tmp_path, style)
    out = tmp_path / "out"
    quantized(model, out, "--high", 4, "--low", 2, "--quantizer", "gptq", "--calibration", calibration)
    found = Calibration(calibration)
    for (place, matrix, residual), (_, _, base) in zip(sections(out, 4), sections(out, 2), strict=True):
        layer, expert, projection = place
        matrices = {p: (model.experts[layer, expert, p], model.biases.get((layer, expert, p))) for p in Projection}
        quantizer = QUANTIZERS["hqq"]
        if expert != RARE:
            outer, inner = found.curvatures(layer, expert, matrices)
            quantizer = partial(quantize_gptq, curvature=inner if projection is Projection.DOWN else outer)
        expected, below = torch.full_like(residual, 0xEE), torch.full_like(base, 0xEE)
        quantize_matrix(model.experts[place], matrix, quantizer, expected, below)
        if model.biases:
            pack_bias(model.biases[place], matrix.base.view(below))
        assert torch.equal(residual, expected), place
        assert torch.equal(base, below), place


def test_errors_and_rare_experts_are_reported(made, tmp_path):
    model, calibration, *_ = made
    out = tmp_path / "out"
    options = ("--high", 4, "--low", 2, "--calibration", calibration)
    said = quantized(model, out, *options)
    assert f"2 of {2 * EXPERTS} experts saw too few tokens in the calibration (fewer than {HIDDEN})" in said
    assert f"layer 2: {RARE}" in said
    report = json.loads(command("inspect", out, "--json").stdout)
    assert report["quantizer"] == "gptq"
    errors = report["errors"]
    assert [row["layer"] for row in errors] == list(MOE_LAYERS)
    for row in errors:
        assert row["fallbacks"] == [RARE]
        assert 0 < row["output"]["4"] < row["weight"]["4"] < row["weight"]["2"] < 1
        assert row["output"]["4"] < row["output"]["2"] < row["weight"]["2"]
    tables = command("inspect", out).stdout
    assert "Relative errors" in tables
    assert f"{errors[0]['output']['2']:.2%}" in tables
    assert "calibrated" in tables
    again = tmp_path / "again"
    quantized(model, again, *options)
    assert (out / "dymoe_experts.json").read_text() == (again / "dymoe_experts.json").read_text()


@pytest.mark.parametrize(("how", "quantizer"), [("SIGKILL", "gptq"), ("SIGINT", "e8")])
def test_a_run_that_was_ended_goes_on_and_gives_the_same_bytes(made, tmp_path, how, quantizer):
    model, calibration, *_ = made
    options = ("--high", 4, "--low", 2, "--quantizer", quantizer, "--calibration", calibration)
    out, whole = tmp_path / "out", tmp_path / "whole"
    program = f"""
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from vllm_dymoe.cli import app
from vllm_dymoe.quantize.packer import Journal
add = Journal.add
def add_and_end(journal, *layer):
    add(journal, *layer)
    os.kill(os.getpid(), signal.{how})
Journal.add = add_and_end
app({["quantize", str(model.folder), "-o", str(out), *map(str, options)]!r})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, capture_output=True).returncode != 0
    assert not out.exists()
    (left,) = tmp_path.glob("out.partial-*")
    assert len((left / packer.JOURNAL).read_text().splitlines()) == 2
    check_continues(model, out, options)
    quantized(model, whole, *options)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in whole.iterdir()
    }
    assert not list(tmp_path.glob("out.partial-*"))


def check_continues(model, out, options):
    read, original = [], Checkpoint.expert
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoint, "expert", lambda *place: (read.append(place[1:]), original(*place))[1])
        quantized(model, out, *options)
    assert sorted(read) == [(1, expert) for expert in range(EXPERTS)], "the first layer is not packed again"


@pytest.mark.parametrize("failing", ["pwrite", "fsync", "rename"])
def test_a_run_whose_disk_was_full_goes_on(made, tmp_path, monkeypatch, failing):
    """Even if everything is packed, and only the final name cannot be given."""
    model, calibration, *_ = made
    options = ("--high", 4, "--low", 2, "--calibration", calibration)
    out, add, rename = tmp_path / "out", packer.Journal.add, os.rename

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def add_and_fill_the_disk(journal, *layer):
        add(journal, *layer)
        for call in {"fsync", failing}:  # all of the second layer may be written already
            full.setattr(os, call, fail)

    with monkeypatch.context() as full:
        if failing == "rename":
            full.setattr(os, "rename", lambda old, new: fail() if new == out else rename(old, new))
        else:
            full.setattr(packer.Journal, "add", add_and_fill_the_disk)
        sentence = refused("quantize", model.folder, "-o", out, *options)
    (left,) = tmp_path.glob("out.partial-*")
    assert "No space left on device; free some space, or write to another disk." in sentence
    assert f"What is packed stays in {left}, and the next run continues with it." in sentence
    if failing != "rename":
        check_continues(model, out, options)
    else:
        monkeypatch.setattr(Checkpoint, "expert", lambda *place: pytest.fail("everything is packed"))
        quantized(model, out, *options)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (out / packer.JOURNAL).exists()


@pytest.mark.parametrize(
    ("error", "left"),
    [(MemoryError("no memory"), 1), (CheckpointError("wrong weights"), 0), (StoreError("wrong weights"), 0)],
)
def test_nothing_stays_of_a_checkpoint_with_wrong_weights(made, tmp_path, monkeypatch, error, left):
    """It will be downloaded again, and may then have the same fingerprint."""
    model, calibration, *_ = made
    original = Checkpoint.expert

    def fail(checkpoint, layer, expert):
        if layer == 1:
            raise error
        return original(checkpoint, layer, expert)

    monkeypatch.setattr(Checkpoint, "expert", fail)
    result = command("quantize", model.folder, "-o", tmp_path / "out", "--calibration", calibration)
    assert result.exit_code == 1
    assert len(list(tmp_path.iterdir())) == left


def test_what_was_packed_for_another_purpose_is_not_gone_on_with(tmp_path):
    folder = SimpleNamespace(partial=tmp_path, sync=lambda layer: None, refusals=contextlib.nullcontext)
    packer.Journal(folder, "4 bits").add(0, "state")
    with (tmp_path / packer.JOURNAL).open("a") as file:
        file.write('[1, "sta')  # the process ended while writing this line
    book = packer.Journal(folder, "4 bits")
    assert book.layers == {0: "state"}
    book.add(1, "state")
    assert packer.Journal(folder, "4 bits").layers == {0: "state", 1: "state"}
    assert packer.journal_purpose(tmp_path) == "4 bits"
    assert packer.Journal(folder, "2 bits").layers == {}
    assert packer.journal_purpose(tmp_path) == "2 bits"


def test_what_cannot_be_calibrated_with_is_refused(made, tmp_path):
    model, calibration, *_ = made
    out = tmp_path / "out"
    gptq = ("quantize", model.folder, "-o", out, "--quantizer", "gptq")
    assert "gptq needs --calibration" in refused(*gptq)
    e8 = (*gptq[:-1], "e8")
    assert "e8 needs --calibration" in refused(*e8, "--high", 4, "--low", 2)
    for precisions in (("--high", 8, "--low", 4), ("--high", 4)):
        assert "set high to 4 and low to 2, or high to 2 and low to 0" in refused(*e8, *precisions)
    assert "holds no calibration" in refused(*gptq, "--calibration", tmp_path)
    assert "does not use --calibration" in refused(*gptq[:-1], "hqq", "--calibration", calibration)
    other = make_model(tmp_path / "other", "mixtral")
    other.tensors = {name: tensor + 1 for name, tensor in other.tensors.items()}
    other.save()
    assert "the calibration of another model" in refused(
        "quantize", other.folder, "-o", out, "--quantizer", "gptq", "--calibration", calibration
    )
    assert not out.exists()


@pytest.mark.parametrize("precisions", [(4, 2), (2, 0)])
def test_the_low_reading_of_a_lattice_loses_less_than_gptqs_at_more_bytes(made, tmp_path, precisions):
    model, calibration, *_ = made
    errors = {}
    for quantizer in ("e8", "gptq"):
        out = tmp_path / quantizer
        options = (
            "--high",
            precisions[0],
            "--low",
            precisions[1],
            "--quantizer",
            quantizer,
            "--calibration",
            calibration,
        )
        said = quantized(model, out, *options)
        errors[quantizer] = Manifest.read(out).errors
        if quantizer == "e8":
            assert "were quantized with what their layers read" in said
    for bits in (some for some in precisions if some):
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
    """Errors of low versions, computed here directly from the recorded calibration."""
    model, calibration, *_ = made
    out = tmp_path / "out"
    quantized(model, out, "--high", 4, "--low", 2, "--quantizer", "e8", "--calibration", calibration)
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


def test_inspect_shows_the_codes_of_a_lattice(made, tmp_path):
    model, calibration, *_ = made
    out = tmp_path / "out"
    quantized(model, out, "--high", 2, "--quantizer", "e8", "--calibration", calibration)
    assert json.loads(command("inspect", out, "--json", "--verify").stdout)["quantizer"] == "e8"
    assert json.loads((out / "config.json").read_text())["quantization_config"]["codebooks"] == {"2": "e8"}
