"""Tokens of a step: computing them takes as long as transferring a chunk's misses."""

from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.plan.test_start import DESKTOP, RTX4090
from tests.vllm_plugin.test_prepare import MODEL
from vllm_dymoe.durable import keep_beside, make_folders
from vllm_dymoe.options import Options, cache_folder
from vllm_dymoe.plan.device import find_device
from vllm_dymoe.plan.machine import KEPT, Probe
from vllm_dymoe.plan.model import read_shape
from vllm_dymoe.vllm_plugin import chunks

CARD = "NVIDIA GeForce RTX 4090"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, in which no start has kept a measurement."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv("DYMOE_STORE_DIR", raising=False)
    return cache_folder()


def configure(budget, **settings):
    additional = {"dymoe": {"expert_budget": budget, "high": 16, "low": 0}}
    options = {"quantization": "dymoe", "max_model_len": 1024, "additional_config": additional}
    return EngineArgs(model=str(MODEL), **options, **settings).create_engine_config().scheduler_config


def test_the_link_and_the_card_take_as_long_as_each_other():
    shape, device = read_shape(str(MODEL)), find_device(CARD, None)
    weights = shape.token_weights + shape.moe_layers * shape.top_k * 3 * shape.hidden * shape.intermediate
    tokens = chunks.chunk_of(missing := 5 << 20, shape, device)
    seconds = 2 * tokens * weights / device.compute
    assert missing / device.link <= seconds <= missing / device.link + 2 * 512 * weights / device.compute
    assert chunks.chunk_of(0, shape, device) == 0
    assert chunks.chunk_of(1 << 40, shape, device) == 8192


@pytest.mark.parametrize(
    ("settings", "budget", "card", "raised"),
    [
        ({}, "25%", CARD, True),
        ({}, "100%", CARD, False),
        ({}, "25%", "a card without a data sheet", False),
        ({"max_num_batched_tokens": 640}, "25%", CARD, False),
        ({"spec_method": "ngram", "spec_tokens": 3}, "25%", CARD, True),
    ],
    ids=["streamed", "resident", "unknown card", "given", "drafts by flags"],
)
def test_vllm_derives_everything_from_it(monkeypatch, caplog, settings, budget, card, raised):
    own = configure(budget, **settings)
    platform = SimpleNamespace(device_type="cuda", get_device_name=lambda: card)
    monkeypatch.setattr(chunks, "current_platform", platform)
    ours = configure(budget, **settings)
    assert (ours.max_num_batched_tokens > own.max_num_batched_tokens) == raised
    assert ours.max_num_encoder_input_tokens == ours.max_num_batched_tokens
    assert ours.max_num_seqs == own.max_num_seqs


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA RTX A6000", "rtx 4090"])
def test_names_of_drivers_are_known(name):
    assert find_device(name, None).decides


@pytest.mark.parametrize("card", [CARD, "a card without a data sheet"])
def test_a_measured_link_comes_before_the_data_sheets(monkeypatch, said, cache, card):
    """A slower link takes longer, and in that time more tokens are computed."""
    monkeypatch.setattr(chunks, "current_platform", SimpleNamespace(device_type="cuda", get_device_name=lambda: card))
    assert chunks.measured_device(str(MODEL), Options()) is None
    by_sheet = configure("75%").max_num_batched_tokens
    slow = RTX4090.model_copy(update={"name": card, "link": find_device(CARD, None).link / 4})
    make_folders(cache)
    keep_beside(cache / KEPT, Probe.of(cache, read_shape(str(MODEL))).key, DESKTOP.model_copy(update={"gpus": (slow,)}))
    measured = configure("75%").max_num_batched_tokens
    assert measured > by_sheet
    assert f"At {slow.link / 1e9:.1f} GB/s, as measured here" in said[-1][1]
