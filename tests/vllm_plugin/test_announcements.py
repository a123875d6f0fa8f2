"""The lines that the plugin logs at start."""

import re

import pytest
import torch

from tests.small_model import make_experts, make_store
from vllm_dymoe import __version__
from vllm_dymoe.options import Options
from vllm_dymoe.planner.constants import SMALL_BATCH_ROWS
from vllm_dymoe.server import ExpertServer
from vllm_dymoe.units import size
from vllm_dymoe.vllm_plugin.announcements import describe_server, warnings

LAYERS, EXPERTS, TOP_K, STAGING = 2, 6, 2, 2
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store():
    return make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K))


def chosen(**options):
    return Options(high=4, low=2, group_size=32, **options)


def server_with(store, slots, **options):
    server = ExpertServer(store, chosen(**options), CPU, automatic_budget=10**9)
    bits = 2 if "low" in server.policy.precision.precisions else 4
    server.resize(server.overhead + slots * server.experts.formats[bits].nbytes)
    assert list(server.slot_plan.slots.values()) == [slots]
    return server


LOW = {"policy": "dymoe", "policy_options": {"retention": 0}, "link_gbps": 1.0}
AHEAD = {"policy": "layer-prefetch"}


@pytest.mark.parametrize(
    ("slots", "options", "said"),
    [
        (LAYERS + STAGING - 1, {}, "with 3 slots in the high precision some layers keep no expert"),
        (LAYERS + STAGING - 1, LOW, "with 3 slots in the low precision some layers keep no expert"),
        (LAYERS * (TOP_K - 1) + STAGING, {}, "a layer keeps 1 experts of the high precision, but one token uses 2"),
        (LAYERS * TOP_K + STAGING, {}, None),
        (LAYERS * EXPERTS, {}, None),
        (LAYERS * TOP_K, {"policy": "on-demand"}, None),  # the policy keeps no expert, as requested
        (LAYERS * EXPERTS, AHEAD, 'policy "layer-prefetch" prefetches nothing while experts come from memory'),
        (LAYERS * EXPERTS, AHEAD | {"link_gbps": 1.0}, None),
    ],
)
def test_settings_that_work_badly_are_a_warning(store, slots, options, said):
    found = warnings(server_with(store, slots, **options))
    assert len(found) == (said is not None)
    assert all(said in sentence for sentence in found)
    assert all("raise expert_budget" in sentence for sentence in found if "precision" in sentence)


def test_a_token_uses_a_ranks_part_of_the_experts_that_its_router_names():
    store = make_store(make_experts(layers=LAYERS, num_experts=EXPERTS, top_k=4))
    keeps_two = server_with(store, LAYERS * 2 + STAGING)
    assert "keeps 2 experts of the high precision, but one token uses 4, so" in warnings(keeps_two)[0]
    assert warnings(keeps_two, expert_ranks=2) == []
    keeps_one = server_with(store, LAYERS + STAGING)
    assert "one token uses 2 here on average, so" in warnings(keeps_one, expert_ranks=2)[0]


def test_the_first_line_says_what_is_active(store):
    server = server_with(store, slots=7)
    line = describe_server(server)
    assert "\n" not in line
    for part in (
        f"vllm-dymoe {__version__} is active: 2 MoE layers x 6 experts, top 2",
        "policy exact",
        "high = 4 bits (6.2 KiB an expert): 7 slots, 2-3 of 6 experts per layer + 2 for streaming",
        f"budget {size(server.slot_plan.limit)} of {size(LAYERS * EXPERTS * server.experts.formats[4].nbytes)}",
        f"kernel {server.kernel.name}",
    ):
        assert part in line, part
    assert line.endswith("host store: host memory.")
    said = describe_server(server, place="auto: for a reason")
    assert said.endswith("host store: host memory (auto: for a reason).")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"policy": "firm", "link_gbps": 1.0, "planning": "host"},
            "; policy firm; prefetch meeting of layers; high",
        ),
        ({"policy": "firm", "link_gbps": 1.0}, "; policy firm; prefetch none in steps of up to 16 tokens, the next"),
        ({"policy": "layer-prefetch", "link_gbps": 1.0}, "prefetch all of the next layer in steps of up to 16 tokens"),
        (
            {"policy": "firm"},
            "; policy firm; prefetch none, because the cores that would copy experts also compute; high",
        ),
        (
            {"policy": "duoserve", "link_gbps": 1.0, "planning": "host"},
            "; policy duoserve; prefetch popularity, because no predictor was given; high",
        ),
        ({"policy_options": {"look_ahead": 0}}, "; prefetch none; high"),
    ],
)
def test_prefetch_is_announced(store, options, said):
    assert said in describe_server(server_with(store, slots=4, **options))


def test_what_decides_in_decode_is_said(memory_store):
    host, device = (
        ExpertServer(memory_store, chosen(expert_budget="50%", planning=name), CPU) for name in ("host", "device")
    )
    assert "decode is planned by the host; " in describe_server(host)
    assert "decode is planned by the device (" in describe_server(device)
    of_each_kind = f"prefetch none in steps of up to {SMALL_BATCH_ROWS} tokens, the next"
    assert of_each_kind in describe_server(device)
    assert "; each chunk of a prompt moves up to" in describe_server(device)
    assert "predictor" not in describe_server(host)
    given = ExpertServer(memory_store, chosen(planning="host", predictor="file"), CPU, 10**9)  # whose cores would copy
    assert re.search(r"prefetch none[^;]*; predictor \S*file is not used", describe_server(given))
    host.host_plans_because = "of a test"
    assert "decode is planned by the host, because of a test; " in describe_server(host)
