"""Which CUDA graphs run around a MoE layer, and that it uses their buffers."""

import logging

import pytest
from vllm.config import CUDAGraphMode, ModelConfig
from vllm.config.compilation import CompilationConfig
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

from tests.e2e.replays import platform_with_graphs
from tests.vllm_plugin.test_prepare import configure
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.vllm_plugin import prepare
from vllm_dymoe.vllm_plugin.graphs import OPERATOR, leave_layers_out, settle_graphs

DEVICE = {"planning": "device", "host_store": "pinned"}


@pytest.fixture(autouse=True)
def _defaults(monkeypatch):
    monkeypatch.setattr(prepare, "chosen_options", lambda config: None)


def configured(monkeypatch, *, breakable=False, dymoe=None, **settings):
    # Here and not in the test, because vLLM itself sets it in the environment for some architectures.
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(breakable)))
    with platform_with_graphs():
        ours = configure(dymoe, **settings)
        plain = configure(quantization=None, **settings)
    return ours, plain


@pytest.mark.parametrize(
    ("settings", "asked", "after"),
    [
        ({}, "FULL_AND_PIECEWISE", "PIECEWISE"),
        ({"cudagraph_mode": "PIECEWISE"}, "PIECEWISE", "PIECEWISE"),
        ({"cudagraph_mode": "FULL"}, "FULL", "PIECEWISE"),
        ({"cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY", "PIECEWISE"),
        ({"cudagraph_mode": "NONE"}, "NONE", "NONE"),
        ({"splitting_ops": []}, "FULL", "NONE"),
        ({"splitting_ops": [], "cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY", "NONE"),
        ({"splitting_ops": ["vllm::unified_attention_with_output"], "cudagraph_mode": "FULL"}, "FULL", "NONE"),
        ({"splitting_ops": CompilationConfig._attention_ops}, "FULL_AND_PIECEWISE", "PIECEWISE"),
        ({"mode": 0}, "FULL_DECODE_ONLY", "NONE"),
        ({"mode": 0, "cudagraph_mode": "FULL"}, "FULL", "NONE"),
        ({"use_inductor_graph_partition": True}, "FULL_AND_PIECEWISE", "NONE"),
        ({"pass_config": {"fuse_attn_quant": True}}, "FULL", "NONE"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_the_graphs_of_a_configuration(settings, asked, after, monkeypatch, said):
    ours, plain = configured(monkeypatch, compilation_config=settings)
    assert plain.compilation_config.cudagraph_mode.name == asked
    lines = list(said)
    check(ours, plain, CUDAGraphMode[after])
    if asked == "NONE":
        assert lines == []
    else:
        ((level, text),) = lines
        assert level == (logging.INFO if asked == after else logging.WARNING)
        assert text.startswith("vllm-dymoe: ")
        assert ("no CUDA graphs" in text) == (after == "NONE")
        assert (f"cudagraph_mode {asked} becomes {after}" in text) == (asked != after)


@pytest.mark.parametrize("drafted", [0, 2, 3])
@pytest.mark.parametrize(
    ("settings", "asked", "after"),
    [
        ({}, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ({"cudagraph_mode": "FULL"}, "FULL", "FULL_DECODE_ONLY"),
        ({"cudagraph_capture_sizes": [16, 3, 40]}, "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"),
        ({"splitting_ops": []}, "FULL", "FULL_DECODE_ONLY"),
        ({"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, "FULL_DECODE_ONLY", "FULL_DECODE_ONLY"),
        ({"cudagraph_mode": "PIECEWISE"}, "PIECEWISE", "PIECEWISE"),
        ({"cudagraph_capture_sizes": [32, 64]}, "FULL_AND_PIECEWISE", "PIECEWISE"),
        ({"use_inductor_graph_partition": True}, "FULL_AND_PIECEWISE", "NONE"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_decode_step_is_one_graph_where_the_device_decides(settings, asked, after, drafted, monkeypatch, said):
    speculation = {"method": "ngram", "num_speculative_tokens": drafted, "prompt_lookup_max": 3}
    ours, plain = configured(
        monkeypatch,
        dymoe=DEVICE,
        compilation_config=dict(settings),
        **({"speculative_config": speculation} if drafted else {}),
    )
    ours_now, query = ours.compilation_config, 1 + drafted
    assert plain.compilation_config.cudagraph_mode.name == asked
    assert ours_now.cudagraph_mode.name == after
    assert len(said) == 1
    if after != "NONE":
        piecewise = "vllm::unified_attention_with_output" in ours_now.splitting_ops
        assert (OPERATOR in ours_now.splitting_ops) == piecewise, "vLLM's workers may fall back to pieces"
    if after != "FULL_DECODE_ONLY":
        return
    ours_now.adjust_cudagraph_sizes_for_spec_decode(query)  # as a worker does
    dispatcher = CudagraphDispatcher(ours)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, query)
    assert not dispatcher.cudagraph_keys[CUDAGraphMode.PIECEWISE]
    sizes = [key.num_tokens for key in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]]
    assert all(size % query == 0 for size in sizes)
    assert max(sizes) > SMALL_BATCH_ROWS // query * query in sizes, "few rows find a small-batch step"


def test_drafts_that_a_device_takes_off_and_drafts_too_long_are_left_to_the_host(monkeypatch, said):
    for method, drafted in (("ngram_gpu", 2), ("ngram", SMALL_BATCH_ROWS)):
        speculation = {"method": method, "num_speculative_tokens": drafted, "prompt_lookup_max": 3}
        ours, _ = configured(monkeypatch, dymoe=DEVICE, speculative_config=speculation)
        assert ours.compilation_config.cudagraph_mode == CUDAGraphMode.PIECEWISE


def test_a_worker_whose_device_does_not_decide_leaves_layers_out(monkeypatch, said):
    ours, _ = configured(monkeypatch, dymoe=DEVICE)
    leave_layers_out(ours, "of a test")
    assert ours.compilation_config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert said[-1] == (logging.WARNING, said[-1][1])
    assert "of a test" in said[-1][1]
    lines = len(said)
    leave_layers_out(ours, "of a test")
    assert len(said) == lines


@pytest.mark.parametrize("asked", ["FULL", "FULL_DECODE_ONLY", "PIECEWISE"])
def test_breakable_graphs_are_never_full(asked, monkeypatch, said):
    ours, plain = configured(monkeypatch, breakable=True, compilation_config={"cudagraph_mode": asked})
    assert plain.compilation_config.cudagraph_mode.name == asked
    assert len(said) == 1
    check(ours, plain, CUDAGraphMode.PIECEWISE, breakable=True)


def check(ours, plain, mode, *, breakable=False):
    """Check that vLLM derives what it would derive if a user had asked for the mode."""
    settings = ours.compilation_config
    assert settings.cudagraph_mode == mode
    assert (OPERATOR in settings.splitting_ops) == (mode == CUDAGraphMode.PIECEWISE and not breakable)
    assert [name for name in settings.splitting_ops if name != OPERATOR] == plain.compilation_config.splitting_ops
    if mode == CUDAGraphMode.NONE:
        assert (settings.cudagraph_capture_sizes, settings.max_cudagraph_capture_size) == ([], 0)
    else:
        assert settings.cudagraph_capture_sizes == plain.compilation_config.cudagraph_capture_sizes
        assert settings.cudagraph_capture_sizes[-1] == settings.max_cudagraph_capture_size > 0
    dispatcher = CudagraphDispatcher(ours)
    dispatcher.initialize_cudagraph_keys(mode, 1)
    sizes = [key.num_tokens for key in dispatcher.cudagraph_keys[CUDAGraphMode.PIECEWISE]]
    assert sorted(set(sizes)) == settings.cudagraph_capture_sizes
    assert not dispatcher.cudagraph_keys[CUDAGraphMode.FULL]
    before = settings.splitting_ops
    settle_graphs(ours)  # settling twice changes nothing
    assert settings.cudagraph_mode == mode
    assert settings.splitting_ops == before


def test_a_model_that_is_cut_elsewhere_is_not_taken_from_the_compilation_cache(monkeypatch, said):
    ours, _ = configured(monkeypatch)
    cut = ours.compute_hash()
    ours.compilation_config.splitting_ops = [name for name in ours.compilation_config.splitting_ops if name != OPERATOR]
    assert ours.compute_hash() != cut


def test_the_list_of_a_user_is_not_written_to(monkeypatch, said):
    mine = list(CompilationConfig._attention_ops)
    configured(monkeypatch, compilation_config=CompilationConfig(splitting_ops=mine))
    assert OPERATOR not in mine
    assert OPERATOR not in CompilationConfig._attention_ops


def test_where_no_graph_can_be(monkeypatch, said):
    ours, plain = configured(monkeypatch, enforce_eager=True)
    check(ours, plain, CUDAGraphMode.NONE)
    settings = configure().compilation_config  # without changing the platform
    assert settings.cudagraph_mode == CUDAGraphMode.NONE
    assert OPERATOR not in settings.splitting_ops
    assert said == []
    monkeypatch.setattr(ModelConfig, "using_transformers_backend", lambda self: True)
    ours, _ = configured(monkeypatch)
    assert ours.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert "Transformers backend" in said[0][1]
