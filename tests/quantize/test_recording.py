"""Parts of a recording: contents, interrupted runs and refusals."""

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from tests.quantize.recordings import correlated_inputs, routing, write_recording
from vllm_dymoe.quantize.recording import MANIFEST, CalibrationError, PartWriter, Recording, check_space

LAYERS, HIDDEN, TOP_K, TOKENS = 3, 40, 2, 50


def writer(path, tokens=TOKENS):
    return PartWriter(path, LAYERS, HIDDEN, TOP_K, torch.bfloat16, tokens)


def steps(layer):
    """Return a layer's inputs and routing, split into steps of odd sizes.

    They have more tokens than are kept.
    """
    inputs = correlated_inputs(TOKENS + 9, HIDDEN, layer).bfloat16()
    kinds = (inputs, *routing(TOKENS + 9, 5, TOP_K, layer))
    return list(zip(*(kind.split([1, 17, 0, 20, 21]) for kind in kinds), strict=True))


def write_part(path):
    part = writer(path)
    for step in range(5):
        for layer in range(LAYERS):
            part.add(layer, *steps(layer)[step])
    part.finish()


def test_a_part_holds_what_every_layer_read(tmp_path):
    path = tmp_path / "part-00000.safetensors"
    write_part(path)
    with safe_open(path, framework="pt") as file:
        assert len(file.keys()) == 3 * LAYERS
        for layer in range(LAYERS):
            inputs, weights, experts = (torch.cat(kind)[:TOKENS] for kind in zip(*steps(layer), strict=True))
            assert torch.equal(file.get_tensor(f"{layer}.inputs"), inputs)
            assert torch.equal(file.get_tensor(f"{layer}.weights"), weights)
            assert torch.equal(file.get_tensor(f"{layer}.experts"), experts.to(torch.int16))
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


def test_a_part_is_not_there_before_it_is_complete(tmp_path):
    path = tmp_path / "part-00000.safetensors"
    part = writer(path)
    for layer in range(LAYERS):
        part.add(layer, *steps(layer)[1])
    assert not path.exists()
    with pytest.raises(CalibrationError, match="33 tokens fewer"):
        part.finish()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_written_again(tmp_path):
    """The next run writes the same bytes as an undisturbed one."""
    path, again = tmp_path / "part-00000.safetensors", tmp_path / "again.safetensors"
    killed = writer(path, tokens=TOKENS * 2)  # longer than the final recording
    killed.add(0, *steps(0)[3])
    os.close(killed._file)
    assert [found.name for found in tmp_path.iterdir()] == [f"{path.name}.unfinished"]
    write_part(path)
    write_part(again)
    assert path.read_bytes() == again.read_bytes()


def test_two_processes_do_not_write_one_part(tmp_path):
    path = tmp_path / "part-00000.safetensors"
    first = writer(path)
    with pytest.raises(CalibrationError, match="another process is recording"):
        writer(path)
    first.discard()
    writer(path).discard()


def test_a_disk_that_refuses_is_a_sentence(tmp_path):
    with pytest.raises(CalibrationError, match="No such file"):
        writer(tmp_path / "nowhere" / "part-00000.safetensors")
    part = writer(tmp_path / "part-00000.safetensors")
    os.close(part._file)
    part._file = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(CalibrationError, match="No space left"):
        part.add(0, *steps(0)[1])


def test_manifest_and_parts(tmp_path):
    recording, _, _ = write_recording(tmp_path / "found", layers=(1, 4), num_experts=5, top_k=2, hidden=32)
    folder = tmp_path / "found"
    assert Recording.read(folder) == recording
    assert recording.missing(folder) == []
    assert recording.nbytes == 500 * 2 * (2 * 32 + 6 * 2)
    sizes = sum(os.path.getsize(recording.part(folder, part)) for part in range(2))
    assert 0 < sizes - recording.nbytes < 2000, "the formula is that of the files, but for their headers"
    recording.part(folder, 1).unlink()
    assert recording.missing(folder) == [1]


def test_a_disk_that_is_too_small_is_refused(tmp_path, monkeypatch):
    recording, _, _ = write_recording(tmp_path, layers=(0,), num_experts=5, top_k=2, hidden=32)
    check_space(recording, tmp_path)
    sentence = r"10{15} tokens .* 67\.5 PiB"
    with pytest.raises(CalibrationError, match=sentence):
        check_space(replace(recording, parts=(*recording.parts, 10**15)), tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=300))
    with pytest.raises(CalibrationError, match=r"760 B.* 300 B"):
        check_space(replace(recording, parts=(*recording.parts, 10)), tmp_path)


def test_a_part_that_an_ended_run_began_takes_no_room_twice(tmp_path, monkeypatch):
    recording, _, _ = write_recording(tmp_path, layers=(0,), num_experts=5, top_k=2, hidden=32)
    longer = replace(recording, parts=(*recording.parts, 200))
    part = longer.part(tmp_path, len(recording.parts))
    begun = part.with_name(f"{part.name}.unfinished")
    begun.write_bytes(b"x" * 8192)
    rest = 200 * recording.bytes_per_token - begun.stat().st_blocks * 512
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=rest))
    check_space(longer, tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=rest - 1))
    with pytest.raises(CalibrationError, match="1 B too little"):
        check_space(longer, tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "Invalid JSON"),
        ("[]", "should be an object"),
        ({"model": None}, "model: "),
        ({"format": "another"}, "format: "),
        ({"version": 99}, "version: "),
    ],
)
def test_manifests_that_cannot_be_read(tmp_path, content, why):
    write_recording(tmp_path, layers=(0,), num_experts=5, top_k=2, hidden=32)
    path = tmp_path / MANIFEST
    path.write_text(content if isinstance(content, str) else json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(CalibrationError, match=f"cannot be used .*{why}"):
        Recording.read(tmp_path)
    with pytest.raises(CalibrationError, match="holds no calibration"):
        Recording.read(tmp_path / "nowhere")


def test_a_part_is_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tmp_path / "part-0.safetensors.unfinished").symlink_to(victim)
    with pytest.raises(CalibrationError):
        PartWriter(tmp_path / "part-0.safetensors", LAYERS, HIDDEN, TOP_K, torch.bfloat16, 4)
    assert victim.read_bytes() == b"mine"
