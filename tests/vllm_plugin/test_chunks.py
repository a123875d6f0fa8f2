"""Tokens of a step: computing them takes as long as transferring a chunk's misses."""

from types import SimpleNamespace

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.vllm_plugin.test_prepare import MODEL
from vllm_dymoe.plan.device import find_device
from vllm_dymoe.plan.model import read_shape
from vllm_dymoe.vllm_plugin import chunks

CARD = "NVIDIA GeForce RTX 4090"


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
    def configure():
        additional = {"dymoe": {"expert_budget": budget, "high": 16, "low": 0}}
        options = {"quantization": "dymoe", "max_model_len": 1024, "additional_config": additional}
        return EngineArgs(model=str(MODEL), **options, **settings).create_engine_config().scheduler_config

    own = configure()
    platform = SimpleNamespace(device_type="cuda", get_device_name=lambda: card)
    monkeypatch.setattr(chunks, "current_platform", platform)
    ours = configure()
    assert (ours.max_num_batched_tokens > own.max_num_batched_tokens) == raised
    assert ours.max_num_encoder_input_tokens == ours.max_num_batched_tokens
    assert ours.max_num_seqs == own.max_num_seqs


@pytest.mark.parametrize("name", ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA RTX A6000", "rtx 4090"])
def test_names_of_drivers_are_known(name):
    assert find_device(name, None).decides
