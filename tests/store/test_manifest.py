"""The manifest: what it says, and what is no manifest."""

import json
from dataclasses import replace

import pytest

from tests.small_model import make_experts
from vllm_dymoe.store import MANIFEST, FileStore, Manifest, StoreError


def test_the_manifest_survives_the_round_trip(store):
    assert Manifest.read(store.folder) == store.manifest == Manifest(store.experts, "rtn", "a model")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "holds no expert store"),
        ("{", "is not a manifest"),
        ("[]", "is not a manifest"),
        (json.dumps({"version": 99}), "has store version 99, but this vllm-dymoe reads version 5"),
        (json.dumps({"version": 5}), "is not a manifest"),
    ],
)
def test_a_wrong_manifest_is_named(tmp_path, content, sentence):
    if content is not None:
        (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(StoreError, match=sentence):
        FileStore(tmp_path)


@pytest.mark.parametrize("changes", [{"integer_zeros": True}, {"act_order": True}, {"bias": True}])
def test_a_manifest_says_what_its_formats_are(tmp_path, changes):
    experts = make_experts()
    experts = replace(experts, formats={**experts.formats, 4: replace(experts.formats[4], **changes)})
    if "bias" in changes:  # of all formats
        experts = make_experts(bias=True)
    manifest = Manifest(experts, "rtn", "a model")
    (tmp_path / MANIFEST).write_text(json.dumps(manifest.to_json()))
    assert Manifest.read(tmp_path) == manifest
    assert manifest != Manifest(make_experts(), "rtn", "a model")


@pytest.mark.parametrize("bits", [(4, 2), (8, 4)])
def test_a_low_version_inside_the_high_one_survives_the_round_trip(tmp_path, bits):
    manifest = Manifest(make_experts(bits=bits, nested=True), "rtn", "a model")
    (tmp_path / MANIFEST).write_text(json.dumps(manifest.to_json()))
    assert Manifest.read(tmp_path) == manifest != Manifest(make_experts(bits=bits), "rtn", "a model")
