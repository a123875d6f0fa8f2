"""The lines at start."""

import pytest
import torch

from tests.small_model import make_experts, make_store
from vllm_dymoe import __version__
from vllm_dymoe.config import Options
from vllm_dymoe.runtime import MoERuntime
from vllm_dymoe.runtime.decode_path import DECODE_ROWS
from vllm_dymoe.units import size
from vllm_dymoe.vllm_adapter.announcements import describe_runtime, warnings

LAYERS, EXPERTS, TOP_K, STAGING = 2, 6, 2, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store():
    return make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K))


def chosen(**options):
    return Options(hi=4, lo=2, group_size=32, **options)


def runtime_with(store, slots, **options):
    runtime = MoERuntime(store, chosen(**options), CPU, automatic_budget=10**9)
    bits = 2 if "lo" in runtime.system.precision.tiers else 4
    runtime.resize(runtime.kernel.workspace_bytes + slots * runtime.experts.formats[bits].nbytes)
    assert list(runtime.plan.slots.values()) == [slots]
    return runtime


LOW = {"system": "dymoe", "system_options": {"retention": 0}, "link_gbps": 1.0}
AHEAD = {"system": "layer-prefetch"}


@pytest.mark.parametrize(
    ("slots", "options", "said"),
    [
        (LAYERS + STAGING - 1, {}, "with 3 slots in the hi tier some layers keep no expert at all"),
        (LAYERS + STAGING - 1, LOW, "with 3 slots in the lo tier some layers keep no expert at all"),
        (LAYERS * (TOP_K - 1) + STAGING, {}, "a layer keeps 1 experts of the hi tier but one token uses 2"),
        (LAYERS * TOP_K + STAGING, {}, None),
        (LAYERS * EXPERTS, {}, None),
        (LAYERS * TOP_K, {"system": "on-demand"}, None),  # which keeps none because it was asked to
        (LAYERS * EXPERTS, AHEAD, 'system "layer-prefetch" fetches nothing ahead while experts come from memory'),
        (LAYERS * EXPERTS, AHEAD | {"link_gbps": 1.0}, None),
    ],
)
def test_settings_that_work_badly_are_a_warning(store, slots, options, said):
    found = warnings(runtime_with(store, slots, **options))
    assert len(found) == (said is not None)
    assert all(said in sentence for sentence in found)
    assert all("raise expert_budget" in sentence for sentence in found if "tier" in sentence)


def test_a_token_uses_a_ranks_part_of_the_experts_that_its_router_names():
    store = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=4))
    keeps_two = runtime_with(store, LAYERS * 2 + STAGING)
    assert "keeps 2 experts of the hi tier but one token uses 4, so" in warnings(keeps_two)[0]
    assert warnings(keeps_two, expert_ranks=2) == []
    keeps_one = runtime_with(store, LAYERS + STAGING)
    assert "one token uses 2 here on average, so" in warnings(keeps_one, expert_ranks=2)[0]


def test_the_first_line_says_what_is_active(store):
    runtime = runtime_with(store, slots=7)
    line = describe_runtime(runtime)
    assert "\n" not in line
    for part in (
        f"vllm-dymoe {__version__} is active: 2 MoE layers x 6 experts, top 2",
        "system exact",
        "hi = 4 bits (6.2 KiB an expert): 7 slots, 2-3 of 6 experts per layer + 2 for streaming",
        f"budget {size(runtime.plan.limit)} of {size(LAYERS * EXPERTS * runtime.experts.formats[4].nbytes)}",
        f"kernel {runtime.kernel.name}",
    ):
        assert part in line, part
    assert line.endswith("host store: host memory.")
    said = describe_runtime(runtime, place="auto: for a reason")
    assert said.endswith("host store: host memory (auto: for a reason).")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"system": "firm", "link_gbps": 1.0}, "; system firm; prefetch meeting of layers; hi"),
        ({"system": "firm"}, "; system firm; prefetch none, because the cores that would copy compute; hi"),
        (
            {"system": "duoserve", "link_gbps": 1.0},
            "; system duoserve; prefetch popularity, because no predictor was given; hi",
        ),
        ({"system_options": {"look_ahead": 0}}, "; prefetch none; hi"),
    ],
)
def test_prefetch_is_announced(store, options, said):
    assert said in describe_runtime(runtime_with(store, slots=4, **options))


def test_what_decides_in_decode_is_said(memory_store):
    host, device = (
        MoERuntime(memory_store, chosen(expert_budget="50%", decisions=name), CPU) for name in ("host", "device")
    )
    assert "decode is decided by the host; " in describe_runtime(host)
    assert "decode is decided by the device (" in describe_runtime(device)
    of_each_kind = f"prefetch none in steps of up to {DECODE_ROWS} tokens, the next"
    assert of_each_kind in describe_runtime(device)
    assert "; each chunk of a prompt moves up to" in describe_runtime(device)
    for name in ("host", "device"):
        asked = MoERuntime(memory_store, chosen(decisions=name, predictor="file", link_gbps=1.0), CPU, 10**9)
        assert any("predictor is not asked" in sentence for sentence in warnings(asked)) == (name == "device")
    host.host_decides_because = "of a test"
    assert "decode is decided by the host, because of a test; " in describe_runtime(host)
