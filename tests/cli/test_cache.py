"""``vllm-dymoe cache``: the stores of earlier starts and their removal."""

import json
import os

import pytest

from tests.cache.store.stores import write
from tests.cli.checkpoints import command, refused
from tests.small_model import make_experts
from vllm_dymoe import durable
from vllm_dymoe.cache.store import MANIFEST, Manifest
from vllm_dymoe.cache.store.writer import StoreWriter

STATES = {
    "good-0123456789abcdef": "complete",
    "old-0123456789abcdef": "version 99",
    "broken-0123456789abcdef": "damaged",
    "begun-0123456789abcdef": "unfinished",
    "now-0123456789abcdef": "being written",
}


@pytest.fixture
def root(tmp_path):
    """Create a store in each state, and a file that does not belong to the plugin."""
    root, experts = tmp_path / "cache", make_experts()
    for name in ("good", "old", "broken"):
        write(root / f"{name}-0123456789abcdef" / "rank-0-0", experts).close()
    manifest = root / "old-0123456789abcdef" / "rank-0-0" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
    (root / "broken-0123456789abcdef" / "rank-0-0" / MANIFEST).write_text("{")
    (root / "broken-0123456789abcdef" / "rank-0-0.lock").touch()
    left = root / "begun-0123456789abcdef" / f"rank-0-0.partial-{durable._boot()}-1"
    left.mkdir(parents=True)
    (left / "shard").write_bytes(b"x" * 1000)
    writer = StoreWriter(root / "now-0123456789abcdef" / "rank-0-0", Manifest(experts, "rtn", "a model"))
    (root / "notes").mkdir()
    (root / "notes" / "mine.txt").write_text("mine")
    yield root
    writer.discard()


def listed(root):
    result = command("cache", "list", "--store-dir", root, "--json")
    assert result.exit_code == 0, result.output + result.stderr
    return {row["name"]: row for row in json.loads(result.stdout)}


def test_every_store_is_listed_with_its_state_and_size(root):
    rows = listed(root)
    assert {name: row["state"] for name, row in rows.items()} == STATES
    good = rows["good-0123456789abcdef"]
    folder = root / "good-0123456789abcdef" / "rank-0-0"
    assert good["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert (good["ranks"], good["bits"], good["quantizer"]) == (1, [4, 2], "rtn")
    table = command("cache", "list", "--store-dir", root).stdout
    assert all(name in table for name in STATES)


def test_cleaning_removes_what_no_start_can_use_and_nothing_else(root):
    assert command("cache", "clean", "--store-dir", root).exit_code == 0
    assert listed(root).keys() == {"good-0123456789abcdef", "old-0123456789abcdef", "now-0123456789abcdef"}
    assert (root / "notes" / "mine.txt").exists()


def test_named_stores_are_removed_whole_and_what_is_being_written_never_is(root):
    assert command("cache", "clean", "good-0123456789abcdef", "--store-dir", root).exit_code == 0
    assert not (root / "good-0123456789abcdef").exists()
    assert "being written" in refused("cache", "clean", "now-0123456789abcdef", "--store-dir", root)
    for wrong in ("notes", "absent", "../cache/old-0123456789abcdef", ".", ""):
        refused("cache", "clean", wrong, "--store-dir", root)
    assert command("cache", "clean", "--all", "--store-dir", root).exit_code == 0
    assert sorted(os.listdir(root)) == ["notes", "now-0123456789abcdef"]


def test_a_link_among_stores_is_not_followed(root, tmp_path):
    other = tmp_path / "elsewhere"
    write(other / "rank-0-0", make_experts()).close()
    (root / "link-0123456789abcdef").symlink_to(other)
    assert "link-0123456789abcdef" not in listed(root)
    refused("cache", "clean", "link-0123456789abcdef", "--store-dir", root)
    assert command("cache", "clean", "--all", "--store-dir", root).exit_code == 0
    assert (other / "rank-0-0" / MANIFEST).exists()


def test_without_stores_there_is_nothing_to_list(tmp_path, monkeypatch):
    assert listed(tmp_path / "absent") == {}
    monkeypatch.setenv("DYMOE_STORE_DIR", str(tmp_path))
    assert command("cache", "list").exit_code == 0


@pytest.mark.parametrize("choice", [(), ("--all",), ("--unused-days", 0)])
def test_a_folder_without_stores_of_ranks_is_not_ours(root, choice):
    mine = root / "results-0123456789abcdef"
    mine.mkdir()
    (mine / "rank-0-0-of-the-contest.txt").write_text("mine")
    (mine / "rank-0-0s").mkdir()
    assert mine.name not in listed(root)
    refused("cache", "clean", mine.name, "--store-dir", root)
    assert command("cache", "clean", *choice, "--store-dir", root).exit_code == 0
    assert sorted(os.listdir(mine)) == ["rank-0-0-of-the-contest.txt", "rank-0-0s"]


def test_an_empty_folder_is_removed_and_other_files_beside_stores_stay(root):
    empty, store = root / "empty-0123456789abcdef", root / "good-0123456789abcdef"
    empty.mkdir()
    (store / "notes.txt").write_text("mine")
    row = listed(root)[empty.name]
    assert (row["state"], row["bytes"], row["unused_days"]) == ("unfinished", 0, 0)
    assert "removed good" in command("cache", "clean", "--all", "--store-dir", root).stdout
    assert not empty.exists()
    assert os.listdir(store) == ["notes.txt"]


def test_a_store_whose_model_had_no_name_is_listed_and_removed(root):
    """Earlier versions wrote one without a name for ``vllm serve .``."""
    name = "-0123456789abcdef"
    (root / "good-0123456789abcdef").rename(root / name)
    assert listed(root)[name]["state"] == "complete"
    assert command("cache", "clean", "--store-dir", root, "--", name).exit_code == 0
    assert not (root / name).exists()
