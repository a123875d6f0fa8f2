"""The papers' rows in virtual time: loading on demand takes computing and moving, and no row less than the larger."""

import pytest
import torch

from tests.support.benchmarks import modules_of
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.trace.trace import Trace

STEPS, LAYERS, EXPERTS, TOP_K, HIDDEN = 3, 8, 32, 4, 256


@pytest.fixture
def virtual():
    with modules_of("papers"):
        import virtual

        virtual.compared.make_known()
        yield virtual


@pytest.mark.parametrize("host", [0.0, 300e-6])
def test_a_token_takes_as_long_as_the_data_sheet_says(virtual, host):
    generator = torch.Generator().manual_seed(0)
    keys = torch.rand(STEPS, LAYERS, EXPERTS, generator=generator)
    trace = Trace(
        ModelIdentity("random", "0", LAYERS, EXPERTS, TOP_K, HIDDEN),
        experts=keys.topk(TOP_K).indices.to(torch.uint8),
        weights=torch.full((STEPS, LAYERS, TOP_K), 1 / TOP_K, dtype=torch.float16),
        request=torch.zeros(STEPS, dtype=torch.int32),
        position=torch.arange(STEPS, dtype=torch.int32),
        prefill=torch.zeros(STEPS, dtype=torch.bool),
        router_inputs=torch.randn(STEPS, LAYERS, HIDDEN, generator=generator).half(),
    )
    replay = virtual.Replay(trace, STEPS, host, None)
    computing = 1e3 * LAYERS * (virtual._ATTENTION / virtual._BANDWIDTH + host)
    computing += 1e3 * LAYERS * TOP_K * virtual._EXPERT / virtual._BANDWIDTH
    moving = 1e3 * LAYERS * TOP_K * virtual._EXPERT / virtual._LINK
    rows, shares = virtual._ROWS["duoserve"], virtual._PAGEABLE
    asked = {label: options for label, options in rows.items() if label.startswith("ACC") or label == "an oracle"}
    served = {name: replay.served(options, "top-k", shares.get(name, 1.0))[0] for name, options in asked.items()}
    assert served["ACC"] == pytest.approx(computing + moving, rel=0.01)
    assert served["ACC, pageable copies"] == pytest.approx(computing + moving / 0.4, rel=0.01)
    assert max(computing, moving) <= served["an oracle"] < 0.97 * served["ACC"]
    assert replay.served({"policy": "exact", "policy_options": {"look_ahead": 0}}, "100%")[0] < computing + 0.1
