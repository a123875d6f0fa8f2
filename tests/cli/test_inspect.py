"""``vllm-dymoe inspect``: its numbers, and the damage that ``--verify`` finds."""

import errno
import json
import os
import shutil

import pytest

from tests.cli.checkpoints import EXPERTS, HIDDEN, INTERMEDIATE, MOE_LAYERS, command, make_model, refused
from vllm_dymoe.cache.budget import plan_slots, workspace_bytes
from vllm_dymoe.cache.store import MANIFEST, FileStore, files
from vllm_dymoe.cache.store.files import file_name
from vllm_dymoe.experts.format import places_at
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.policies.dymoe import Dymoe
from vllm_dymoe.policies.exact import Exact


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    model = make_model(tmp_path_factory.mktemp("inspect") / "model")
    model.save()
    return model


@pytest.fixture(scope="module")
def original(model):
    out = model.folder.parent / "checkpoint"
    assert command("quantize", model.folder, "-o", out, "--high", 4, "--low", 2).exit_code == 0
    return out


@pytest.fixture
def checkpoint(original, tmp_path):
    return shutil.copytree(original, tmp_path / "checkpoint")


def report(*arguments):
    result = command("inspect", *arguments, "--json")
    assert result.exit_code == 0, result.output + result.stderr
    return json.loads(result.stdout)


def test_a_checkpoint(checkpoint, model):
    found = report(checkpoint)
    formats = FileStore(checkpoint).experts.formats
    assert found["kind"] == "dymoe checkpoint"
    assert "verified" not in found
    assert report(checkpoint, "--verify")["verified"] is True
    assert found["layers"] == list(MOE_LAYERS)
    assert (found["num_experts"], found["top_k"]) == (EXPERTS, 2)
    assert (found["hidden_size"], found["intermediate_size"]) == (HIDDEN, INTERMEDIATE)
    assert (found["dtype"], found["group_size"], found["quantizer"]) == ("bfloat16", 64, "rtn")
    assert found["tensor_parallel"] == {"rank": 0, "size": 1}
    assert found["dense_bytes"] == sum(tensor.nbytes for tensor in model.dense.values())
    assert found["versions"] == [
        {
            "bits": bits,
            "expert_bytes": formats[bits].whole_nbytes,
            "total_bytes": 2 * EXPERTS * formats[bits].whole_nbytes,
        }
        for bits in (4, 2)
    ]


def test_what_was_measured_of_the_disk(checkpoint):
    assert report(checkpoint)["disk"] is None
    assert "not measured yet" in " ".join(command("inspect", checkpoint).stdout.split())
    rates = FileStore(checkpoint).rates()
    found = report(checkpoint)
    assert (found["alignment"], found["disk"]["depth"]) == (4096, rates.depth)
    assert (found["disk"]["cached"], found["disk"]["warm"]) == (rates.cached, rates.warm)
    assert "GB/s" in command("inspect", checkpoint).stdout
    levels = report(checkpoint, "--budget", "50%", "--host-memory", "25%")["memory_tiers"]
    every = 2 * EXPERTS
    assert [row["experts"] for row in levels] == [every // 2, every // 4, every]


def test_a_checkpoint_that_is_not_quantized_yet(model, original):
    found = report(model.folder)
    assert [version["bits"] for version in found["versions"]] == [16, 8, 4, 2]
    assert found["expert_bytes"] == sum(tensor.nbytes for tensor in model.experts.values())
    written = report(original)
    assert found["versions"][2:] == written["versions"]
    assert found["model"] == written["model"]
    assert found["versions"][0]["total_bytes"] == found["expert_bytes"]
    words = " ".join(command("inspect", model.folder).stdout.split())  # long paths change the line breaks
    assert "not quantized yet" in words


@pytest.mark.parametrize(("names", "policy"), [(["high"], Exact()), (["high", "low"], Dymoe())])
def test_the_smallest_budget_is_the_smallest_and_shares_are_shares(checkpoint, names, policy):
    experts = FileStore(checkpoint).experts
    rows = {row["expert_budget"]: row for row in report(checkpoint)["budgets"] if row["precisions"] == names}
    options, workspace, smallest = Options(high=4, low=2), workspace_bytes(experts), rows["smallest"]["bytes"]
    plan_slots(experts, options, policy, smallest, workspace)
    with pytest.raises(ConfigError):
        plan_slots(experts, options, policy, smallest - 1, workspace)
    if names == ["high"]:
        assert [rows[f"{share}%"]["bytes"] - workspace for share in (25, 50, 100)] == [
            experts.nbytes(4) * share // 100 for share in (25, 50, 100)
        ]
        assert rows["100%"]["experts_kept_per_layer"] == {"high": EXPERTS}


def test_errors_of_every_layer(checkpoint):
    errors = report(checkpoint)["errors"]
    assert [row["layer"] for row in errors] == list(MOE_LAYERS)
    recorded = FileStore(checkpoint).manifest.errors
    for position, row in enumerate(errors):
        assert row["weight"] == {"4": recorded.weight[4][position], "2": recorded.weight[2][position]}
        assert 0.02 < row["weight"]["4"] < 0.2 < row["weight"]["2"] < 0.7, "codes of random weights"
        assert row["output"] == {}
    tables = " ".join(command("inspect", checkpoint, "--verify").stdout.split())
    for text in ("dymoe checkpoint", "1 to 2", "num experts", "rtn", "verified", "smallest", "100%"):
        assert text in tables
    assert f"{errors[1]['weight']['2']:.2%}" in tables
    assert "calibrated" not in tables
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["errors"]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    assert report(checkpoint)["errors"] is None
    assert "not recorded" in command("inspect", checkpoint).stdout
    for path in checkpoint.iterdir():  # keep only the store, as the plugin does for models that it quantizes itself
        if not path.name.startswith("dymoe"):
            path.unlink()
    found = report(checkpoint)
    assert found["kind"] == "expert store"
    assert "dense_bytes" not in found


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("expert", "byte"), [(0, 0), (EXPERTS - 1, -1)])
def test_verify_finds_one_flipped_bit(checkpoint, bits, expert, byte):
    experts = FileStore(checkpoint).experts
    fmt, place = experts.formats[bits], places_at(experts.formats, 4096)[bits]
    path = checkpoint / file_name(MOE_LAYERS[1])
    content = bytearray(path.read_bytes())
    header_end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:header_end])
    begin = header_end + header["4bit.blobs"]["data_offsets"][0] + expert * place.stride + place.start
    content[begin + byte % fmt.nbytes] ^= 0x10
    path.write_bytes(content)
    assert command("inspect", checkpoint).exit_code == 0  # without --verify no experts are read
    sentence = refused("inspect", checkpoint, "--verify")
    projection = "gate" if byte == 0 else "down"
    assert f"the {projection} projection of expert {expert} at {bits} bits does not match its checksum" in sentence
    assert path.name in sentence


def test_missing_files_are_found(checkpoint):
    (checkpoint / "model-00001-of-00001.safetensors").unlink()
    assert "model-00001-of-00001.safetensors cannot be read" in refused("inspect", checkpoint)
    path = checkpoint / file_name(MOE_LAYERS[0])
    path.write_bytes(path.read_bytes()[:-4096])
    for options in ([], ["--verify"]):
        assert "was truncated" in refused("inspect", checkpoint, *options)
    path.unlink()
    assert file_name(MOE_LAYERS[0]) in refused("inspect", checkpoint)
    (checkpoint / MANIFEST).unlink()
    assert "holds no expert store" in refused("inspect", checkpoint)


def test_what_cannot_be_inspected_is_refused(model, tmp_path):
    assert "no checksums to verify" in refused("inspect", model.folder, "--verify")
    assert "no config.json" in refused("inspect", tmp_path)
    assert "does not exist" in refused("inspect", tmp_path / "nowhere")
    assert "25x is not a budget" in refused("inspect", tmp_path, "--budget", "25x")


@pytest.mark.parametrize("readonly", [False, True])
def test_an_older_store_is_verified_and_then_says_which_shards_are_its_own(checkpoint, readonly, monkeypatch):
    manifest = json.loads((checkpoint / MANIFEST).read_text()) | {"version": 6}
    del manifest["shards"]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    assert "would go unnoticed" in report(checkpoint)["shards"]

    def refuse(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    if readonly:
        monkeypatch.setattr(files, "replace_file", refuse)
    found = report(checkpoint, "--verify")
    assert found["verified"]
    assert (os.strerror(errno.EROFS) in found["shards"]) == readonly
    assert report(checkpoint)["format_version"] == (6 if readonly else 7)
