"""``vllm-dymoe trace``: calls to the engine, output, and refusals."""

import pytest

import vllm_dymoe
from tests.cli.checkpoints import command, refused


@pytest.fixture
def asked(monkeypatch):
    """Record the calls to the engine, which never starts."""
    found = {}

    def record_trace(model, prompts, folder, **settings):
        found.update(settings, model=model, prompts=prompts, folder=folder)
        return {"tokens": 1234, "bytes": 5000, "folder": str(folder), "recording": len(prompts) < 3}

    monkeypatch.setattr(vllm_dymoe, "record_trace", record_trace)
    return found


def test_the_command_asks_for_what_it_was_told(tmp_path, asked):
    path = tmp_path / "prompts.txt"
    path.write_text("one\ntwo\n")
    result = command("trace", "a/model", "--prompts", path, "--out", tmp_path / "out", "--max-tokens", 7, "--inputs",
                     "--limit", "1GiB", "--options", '{"high": 16}', "--engine", '{"max_model_len": 99}')  # fmt: skip
    assert result.exit_code == 0, result.output
    assert asked == {
        "model": "a/model",
        "prompts": ["one", "two"],
        "folder": tmp_path / "out",
        "max_tokens": 7,
        "limit": "1GiB",
        "inputs": True,
        "options": {"high": 16},
        "engine": {"max_model_len": 99},
    }
    assert "1234 tokens of 2 prompts, 4.9 KiB" in result.stdout
    assert f"--trace {tmp_path / 'out'}" in result.stdout
    assert "ends early" not in result.stdout
    path.write_text("one\ntwo\nthree\n")
    assert "ends early" in command("trace", "m", "--prompts", path, "--out", tmp_path).stdout


def test_what_cannot_be_recorded_is_refused_in_a_sentence(tmp_path, asked):
    path, out = tmp_path / "prompts.txt", tmp_path / "out"
    assert "cannot be read" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_text("\n \n")
    assert "has no prompts" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as prompts" in refused("trace", "m", "--prompts", path, "--out", out)
    path.write_text("one")
    assert "--options is not JSON" in refused("trace", "m", "--prompts", path, "--out", out, "--options", "{")
    assert "--engine must be a JSON object" in refused("trace", "m", "--prompts", path, "--out", out, "--engine", "3")
    assert asked == {}
