"""The workers' counts as Prometheus metrics, log lines, and ``LLM()``'s summary."""

import asyncio
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm import envs

from vllm_dymoe import summary
from vllm_dymoe.server.stats import ServerStats
from vllm_dymoe.vllm_plugin import patches
from vllm_dymoe.vllm_plugin.metrics import METRICS, Statistics
from vllm_dymoe.vllm_plugin.prepare import WORKER_EXTENSION

NONE = {"demand": 0, "prefetch": 0, "migration": 0}
SOME = {
    "planned": {"high": 3, "low": 1, "skipped": 2},
    "bytes_moved": NONE,
    "transfers": NONE,
    "prefetches": {"useful": 0, "late": 0, "wasted": 0, "cancelled": 0},
    "prefetch_interval": {"prefill": 1, "decode": 1},
    "predictions": {"predicted": 0, "needed": 0, "correct": 0},
    "budget_bytes": 4 << 30,
    "peak_expert_bytes": 3 << 30,
    "slots": {"high": 8},
    "resident_experts": {"high": 4},
    "choices": {"high": 0, "low": 0},
    "moves": {"published": 0, "late": 0, "failed": 0},
}
STATS = ServerStats(**dict.fromkeys((field.name for field in fields(ServerStats)), 0) | SOME)


def answer(moved=0, waited=0.0, resident=0, **others):
    counted = {"bytes_moved": NONE | {"demand": moved}, "resident_experts": {"high": resident}}
    return STATS.to_dict() | counted | {"exposed_wait_seconds": waited} | others


@pytest.fixture
def registry():
    return CollectorRegistry()


def samples(registry):
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (
            sample.name,
            *(sample.labels[key] for key in ("rank", "reason", "precision") if key in sample.labels),
        ): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counters_grow_by_what_was_counted_and_gauges_follow(registry):
    statistics = Statistics("m", registry)
    statistics.record([answer(hits=3, misses=2, moved=20, slots={"high": 8, "low": 4}), answer(hits=1)], 0.0)
    statistics.record([answer(hits=5, misses=6, moved=60, resident=1), answer(hits=1)], 1.0)
    found = samples(registry)
    assert found["vllm_dymoe_hits_total", "0"] == 5
    assert found["vllm_dymoe_hits_total", "1"] == 1
    assert found["vllm_dymoe_misses_total", "0"] == 6
    assert found["vllm_dymoe_transferred_bytes_total", "0", "demand"] == 60
    assert found["vllm_dymoe_resident_experts", "0", "high"] == 1
    assert found["vllm_dymoe_slots", "0", "high"] == 8
    assert found["vllm_dymoe_slots", "0", "low"] == 0, "a precision that goes out of use"


def test_a_counter_never_falls_when_the_counts_are_reset(registry):
    statistics = Statistics("m", registry)
    statistics.record([answer(hits=5, waited=2.0)], 0.0)
    statistics.record([answer(hits=2, waited=0.5)], 1.0)
    found = samples(registry)
    assert found["vllm_dymoe_hits_total", "0"] == 7
    assert found["vllm_dymoe_exposed_wait_seconds_total", "0"] == 2.5


def test_every_count_of_the_server_is_a_metric(registry):
    Statistics("m", registry).record([answer()], 0.0)
    assert {metric.field for metric in METRICS} == set(answer()) - {"hit_rate"}
    assert {name for name, *_ in samples(registry)} == {metric.full_name for metric in METRICS}


def test_the_line_of_an_interval(registry):
    statistics = Statistics("m", registry)
    first = [answer(hits=100), answer()]
    assert statistics.record(first, 9.0) is None, "the first interval has no beginning"
    assert statistics.record(first, 10.0) is None, "an idle one"
    later = [
        answer(hits=103, misses=1, moved=3 << 20, waited=0.5, evictions=4, resident=7),
        answer(misses=4, moved=1 << 20, waited=0.5, resident=8),
    ]
    assert statistics.record(later, 12.0) == (
        "vllm-dymoe: in 2.0 s planned high 0, low 0, skipped 0; hits 37.5% of 8; moved demand 4.0 MiB, prefetch 0 B, "
        "migration 0 B; exposed wait 1.00 s; evictions 4; resident high 15 of 16 slots; memory peak 6.0 GiB of 8.0 GiB"
    )


class Engine:
    def __init__(self, quantization="dymoe", logs=True, client=0, extension=WORKER_EXTENSION):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(quantization=quantization, served_model_name="engine"),
            parallel_config=SimpleNamespace(data_parallel_size=1, worker_extension_cls=extension),
        )
        self.logger_manager = object() if logs else None
        self.engine_core = SimpleNamespace(client_index=client)
        self.asked = 0

    async def collective_rpc(self, method, timeout, kwargs):
        assert timeout == envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, "a node that has died would be waited for"
        assert (method, kwargs) == ("dymoe_stats", {})
        self.asked += 1
        return [answer(hits=1)]


async def original(self):
    pass


@pytest.mark.parametrize(
    "options", [{"quantization": "awq"}, {"logs": False}, {"client": 1}, {"extension": f"{__name__}.Engine"}]
)
def test_no_worker_is_asked_where_nothing_is_to_say(options):
    engine = Engine(**options)
    asyncio.run(patches._do_log_stats(original, engine))
    assert engine.asked == 0


def test_the_workers_are_asked_at_each_interval():
    engine = Engine()
    asyncio.run(patches._do_log_stats(original, engine))
    assert engine.asked == 1


def test_counts_that_cannot_be_had_stop_nothing(warnings):
    """An exception here would end vLLM's logging and, in LLM(), the step."""
    engine = Engine()
    engine.collective_rpc = lambda method, timeout, **more: 1 / 0
    asyncio.run(patches._do_log_stats(original, engine))
    patches._do_log_stats(lambda self: None, engine)
    assert ["division by zero" in warning for warning in warnings()] == [True, True]


def summary_of(*ranks):
    return summary(SimpleNamespace(collective_rpc=lambda method: [stats.to_dict() for stats in ranks]))


def test_every_rank_is_summarized():
    both = summary_of(STATS, replace(STATS, hits=9))
    assert both.to_dict()["ranks"][1] == {"rank": 1, **replace(STATS, hits=9).to_dict()}
    assert [line for line in str(both).splitlines() if not line.startswith(" ")] == ["rank 0", "rank 1"]
    text = str(summary_of(STATS))
    assert "no expert needed yet" in text
    assert not any(word in text for word in ("%", "predicted", "moves")), "nothing of what did not happen"


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (
            {"hits": 3, "misses": 1, "hit_rate": 0.75, "exposed_wait_seconds": 1.25},
            ("75.0% of 4", "1.25 s", "high 4 of 8 slots", "high 3, low 1, skipped 2", "peak 3.0 GiB of 4.0 GiB"),
        ),
        (
            {
                "predictions": {"predicted": 8, "needed": 10, "correct": 6},
                "prefetches": {"useful": 4, "late": 3, "wasted": 2, "cancelled": 1},
            },
            (
                "predicted     60.0% of 10 needed, 75.0% of 8 predicted",
                "prefetched    4 useful, 3 late, 2 wasted, 1 cancelled",
            ),
        ),
        (
            {
                "choices": {"high": 3, "low": 1},
                "moves": {"published": 6, "late": 1, "failed": 0},
                "windows": 3,
                "migration_link_seconds": 0.5,
            },
            (
                "served high   75.0% of 4 choices",
                "moves         6 published, 1 late; the link worked 0.50 s for them",
                "windows       3, 50.0% of 4 high experts replaced in each",
            ),
        ),
    ],
)
def test_a_summary_says_what_happened(counts, said):
    text = str(summary_of(replace(STATS, **counts)))
    assert all(part in text for part in said), text
