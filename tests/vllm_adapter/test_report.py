"""The lines at start."""

import pytest
import torch

from tests.small_model import make_experts, make_store
from vllm_dymoe import __version__
from vllm_dymoe.config import Options
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.units import size
from vllm_dymoe.vllm_adapter.report import describe, warnings

LAYERS, EXPERTS, TOP_K, STAGING = 2, 6, 2, 2


@pytest.fixture(scope="module")
def store():
    return make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K))


def runtime_with(store, slots, **options):
    """A runtime with this many slots in each tier that its system uses."""
    chosen = Options(hi=4, lo=2, group_size=32, **options)
    runtime = MoERuntime(store, chosen, torch.device("cpu"), automatic_budget=10**9)
    bits = chosen.lo if "lo" in runtime.system.precision.tiers else chosen.hi
    runtime.resize(runtime.kernel.workspace_bytes + slots * runtime.experts.formats[bits].nbytes)
    assert list(runtime.plan.slots.values()) == [slots]
    return runtime


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (27648, "27.0 KiB"),
        (5 * 2**20, "5.0 MiB"),
        (2**30 + 2**29, "1.5 GiB"),
        (3 * 2**40, "3.0 TiB"),
        (5000 * 2**40, "5000.0 TiB"),
    ],
)
def test_sizes_are_for_people(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize("tier", ["hi", "lo"])
def test_a_layer_that_keeps_nothing_is_a_warning(store, tier):
    options = {} if tier == "hi" else {"system": "dymoe", "system_options": {"retention": 0}, "link_gbps": 1.0}
    (warning,) = warnings(runtime_with(store, slots=LAYERS + STAGING - 1, **options))
    assert f"with 3 slots in the {tier} tier some layers keep no expert at all" in warning
    assert "raise expert_budget" in warning


def test_a_layer_that_keeps_less_than_a_token_uses_is_a_warning(store):
    (warning,) = warnings(runtime_with(store, slots=LAYERS * (TOP_K - 1) + STAGING))
    assert "a layer keeps 1 experts of the hi tier but one token uses 2" in warning
    assert "raise expert_budget" in warning


@pytest.mark.parametrize("slots", [LAYERS * TOP_K + STAGING, LAYERS * EXPERTS])
def test_a_budget_that_holds_what_a_token_uses_is_none(store, slots):
    assert warnings(runtime_with(store, slots)) == []


def test_a_systems_own_warnings_are_said(store):
    options = {"system": "dymoe", "system_options": {"retention": 0.9}, "expert_budget": "100%", "link_gbps": 1.0}
    runtime = MoERuntime(store, Options(hi=4, lo=2, group_size=32, **options), torch.device("cpu"))
    assert any("leaves the low tier" in sentence for sentence in warnings(runtime))


def test_a_system_without_a_low_tier_may_have_bases(store):
    """A store of two tiers, one inside the other, that is served high."""
    nested = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K, nested=True))
    chosen = Options(hi=4, lo=2, group_size=32, expert_budget="100%")
    runtime = MoERuntime(nested, chosen, torch.device("cpu"))
    assert len(runtime.plan.slots) == 2
    assert warnings(runtime) == []


def test_the_first_line_says_what_is_active(store):
    runtime = runtime_with(store, slots=7)
    line = describe(runtime)
    assert "\n" not in line
    for part in (
        f"vllm-dymoe {__version__} is active: 2 MoE layers x 6 experts, top 2",
        "system exact",
        "hi = 4 bits (6.2 KiB an expert): 7 slots, 2-3 of 6 experts per layer + 2 for streaming",
        f"budget {size(runtime.plan.limit)} of {size(LAYERS * EXPERTS * runtime.experts.formats[4].nbytes)}",
        f"kernel {runtime.kernel.name}",
        "host store: host memory (not page-locked",
    ):
        assert part in line, part


def test_who_decides_in_decode_is_said(memory_store):
    cpu = torch.device("cpu")
    host, device = (
        MoERuntime(memory_store, Options(hi=4, lo=2, group_size=32, expert_budget="50%", decisions=who), cpu)
        for who in ("host", "device")
    )
    assert "decode is decided by the host; " in describe(host)
    assert "decode is decided by the device (" in describe(device)
    host.host_decides_because = "of a test"
    assert "decode is decided by the host, because of a test; " in describe(host)


def test_why_experts_are_where_they_are_is_said_unless_it_was_asked_for(store):
    runtime = runtime_with(store, slots=7)
    assert describe(runtime, place="auto: for a reason").endswith("no CUDA device) (auto: for a reason).")
    assert describe(runtime).endswith("no CUDA device).")


def test_who_keeps_no_expert_because_it_was_asked_to_is_not_warned(store):
    assert warnings(runtime_with(store, slots=LAYERS * TOP_K, system="on-demand")) == []


def test_what_stands_in_for_a_predictor_is_said(store):
    line = describe(runtime_with(store, slots=4, system="duoserve"))
    assert "; system duoserve; prefetch popularity, because no predictor was given; hi" in line
    assert "; prefetch none; hi" in describe(runtime_with(store, slots=4, system_options={"look_ahead": 0}))


def test_a_predictor_is_announced_with_its_file_and_what_it_takes(store):
    class Weighty:
        nbytes = 2048

    chosen = Options(hi=4, lo=2, group_size=32, predictor="a/file", expert_budget="50%")
    line = describe(MoERuntime(store, chosen, torch.device("cpu"), predictor=Weighty()))
    assert "; prefetch trained, by a/file (2.0 KiB of the budget); hi" in line


def test_a_prefetch_that_has_nothing_to_hide_behind_is_said(store):
    (sentence,) = warnings(runtime_with(store, slots=LAYERS * EXPERTS, system="layer-prefetch"))
    assert sentence.startswith('system "layer-prefetch" fetches nothing ahead while experts come from memory')
    assert warnings(runtime_with(store, slots=LAYERS * EXPERTS, system="layer-prefetch", link_gbps=1.0)) == []
    assert warnings(runtime_with(store, slots=LAYERS * EXPERTS)) == [], "the default was not asked for"


def test_prefetch_is_announced(store):
    assert "; system firm; prefetch meeting of layers; hi" in describe(runtime_with(store, slots=4, system="firm"))
