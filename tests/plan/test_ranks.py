"""A model on several ranks, compared with numbers calculated by hand."""

from dataclasses import replace

import pytest

from tests.plan.test_plan import DEEPSEEK_V2_LITE, MIXTRAL, QWEN3_30B
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.options import ConfigError
from vllm_dymoe.plan.choice import ServeSettings, choices, predict
from vllm_dymoe.plan.costs import Costs
from vllm_dymoe.plan.device import DenseRate, Device, ExpertRate, find_device
from vllm_dymoe.plan.model import shape_of
from vllm_dymoe.plan.ranks import Ranks
from vllm_dymoe.plan.routings import made_up

QWEN, LITE, MIX = (shape_of(config, "config.json") for config in (QWEN3_30B, DEEPSEEK_V2_LITE, MIXTRAL))
CARD = find_device("rtx4090", "20GB/s")


@pytest.mark.parametrize(
    ("model", "ranks", "experts", "width", "top_k", "layers", "kv"),
    [
        (QWEN, Ranks(), 128, 768, 8, 48, 1),
        (QWEN, Ranks(tp=2), 128, 384, 8, 48, 2),
        (QWEN, Ranks(tp=8), 128, 96, 8, 48, 4),  # 4 heads, each on two ranks
        (QWEN, Ranks(tp=2, ep=True), 64, 768, 4, 48, 2),
        (QWEN, Ranks(dp=4, ep=True), 32, 768, 2, 48, 1),
        (QWEN, Ranks(tp=2, dp=16, ep=True), 4, 768, 1, 48, 2),
        (QWEN, Ranks(dp=4), 128, 768, 8, 48, 1),
        (QWEN, Ranks(tp=2, pp=3), 128, 384, 8, 16, 6),
        (LITE, Ranks(tp=2, ep=True), 32, 1408, 3, 26, 1),  # both ranks hold the one latent cache
    ],
)
def test_what_one_rank_has(model, ranks, experts, width, top_k, layers, kv):
    shape = ranks.shape(model)
    assert (shape.experts, shape.intermediate, shape.top_k, shape.moe_layers) == (experts, width, top_k, layers)
    assert shape.kv_bytes == model.kv_bytes // kv
    parts = ranks.tp * ranks.pp * (ranks.dp if ranks.ep else 1)
    whole = shape.packed((16,)).nbytes(16) * parts
    assert whole == pytest.approx(model.packed((16,)).nbytes(16), rel=0.01)


ROW = 2048 * 2


@pytest.mark.parametrize(
    ("ranks", "near", "far"),
    [
        (Ranks(), 0, 0),
        (Ranks(dp=4), 0, 0),  # independent engines
        (Ranks(tp=2), 2 * 48 * 4 * ROW, 0),  # two sums in a layer; each sends (2 - 1) / 2 of the rows there and back
        (Ranks(tp=4), 2 * 48 * 4 * ROW * 1.5, 0),
        (Ranks(dp=2, ep=True), 48 * 4 * (2 * ROW + 64), 0),
        (Ranks(dp=4, ep=True, nodes=2, network=1e9), 48 * 4 * (2 * ROW + 64), 2 * 48 * 4 * (2 * ROW + 64)),
        (Ranks(tp=2, dp=2, ep=True), 48 * 4 * (2 * ROW + 64) + 48 * 4 * ROW, 0),
        (Ranks(tp=2, nodes=2, network=1e9), 0, 2 * 48 * 4 * ROW),
    ],
)
def test_what_ranks_send_each_other_in_a_step_of_four_tokens(ranks, near, far):
    assert ranks.sent(QWEN, 4) == (near, far)
    each = ranks.nodes * 1e9 / (ranks.tp * ranks.dp)
    assert ranks.seconds(QWEN, CARD, 4) == pytest.approx(near / 20e9 + far / each)
    assert replace(ranks, per_switch=2).seconds(QWEN, CARD, 4) == pytest.approx(near / 10e9 + far / each)


def test_two_cards_behind_one_switch_fetch_half_as_fast_and_stages_add_up():
    identity = ModelIdentity("m", "", MIX.moe_layers, MIX.experts, MIX.top_k, MIX.hidden)

    def fastest(ranks):
        shape, device = ranks.shape(MIX), ranks.device(CARD)
        rows = choices(shape, device, made_up(replace(identity, num_layers=shape.moe_layers), 1), ServeSettings(), 64)
        return next(row for row in rows if row.given == {"policy": "on-demand", "high": 4})

    ranks, switched = Ranks(tp=2), Ranks(tp=2, per_switch=2)
    alone, both = fastest(ranks), fastest(switched)
    moving = alone.moved / CARD.link
    assert both.moved == alone.moved
    assert 0.8 * moving < both.tpot - alone.tpot <= moving * 1.001, "computing hides a little of it"
    stages = Ranks(pp=2)
    row = fastest(stages)
    assert stages.whole(row, MIX, CARD, 1, 64).tpot == pytest.approx(2 * row.tpot)
    assert ranks.whole(alone, MIX, CARD, 1, 64).tpot == pytest.approx(alone.tpot + ranks.seconds(MIX, CARD, 1))


def test_ranks_share_the_cpu_and_the_disk_of_their_machine():
    gpu = replace(CARD, host=6e10, disk=2e9)
    assert Ranks(tp=2).device(gpu) == replace(gpu, host=3e10, disk=1e9)
    assert Ranks(tp=2, nodes=2, network=1e9).device(gpu) == gpu
    rates = ExpertRate("cpu", 1, 1, False, 2e10, 8e10), DenseRate(16, 1, 1e9)
    cpu = Device("CPU", 64 << 30, 4e10, 1e12, float("inf"), rates=rates[:1], dense=rates[1:])
    half = replace(
        cpu, bandwidth=2e10, compute=5e11, rates=(replace(rates[0], read=1e10, compute=4e10),),
        dense=(replace(rates[1], weights=5e8),),
    )  # fmt: skip
    assert Ranks(pp=2).device(cpu) == half


@pytest.mark.parametrize(
    ("ranks", "sentence"),
    [
        (Ranks(dp=2, pp=2), "leave --pp out"),
        (Ranks(tp=3, nodes=2, network=1.0), "change --nodes"),
        (Ranks(tp=2, nodes=2), "--network 12GB/s"),
    ],
)
def test_what_cannot_be_spread_is_a_sentence(ranks, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ranks.check()


def test_arguments_of_engines_are_those_of_serve():
    assert Ranks(tp=2, dp=2, ep=True).for_engines() == {
        "tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True,
    }  # fmt: skip
    assert Ranks(pp=2, nodes=2).for_engines() == {"pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    for ranks, sentence in ((Ranks(dp=2, nodes=2), "leave --nodes out"), (Ranks(tp=3, nodes=2), "change --nodes")):
        with pytest.raises(ConfigError, match=sentence):
            ranks.for_engines()


def test_the_rank_that_is_slowest_counts():
    """With expert parallelism, a step takes as long as its busiest rank."""
    identity = ModelIdentity("m", "", 2, QWEN.experts, QWEN.top_k, QWEN.hidden)
    routings = made_up(identity, 4)

    def tpot(ranks):
        shape = Ranks(tp=ranks, ep=True).shape(QWEN)
        free = {"costs": Costs.nothing(), "prompt": 64, "chunk": 64}
        return predict({}, 4 << 30, 1.0, replace(shape, moe_layers=2), CARD, routings.spread(ranks), **free).tpot

    one, four = tpot(1), tpot(4)
    assert one / 4 < four < one, "not a quarter of the experts: the busiest rank waits"
