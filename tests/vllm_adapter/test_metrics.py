"""What the workers count, as Prometheus metrics and as a line in the log."""

import asyncio
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_dymoe.runtime.stats import RuntimeStats
from vllm_dymoe.vllm_adapter import metrics, patches
from vllm_dymoe.vllm_adapter.metrics import METRICS, Statistics, statistics_of


def answer(hits=0, misses=0, moved=0, waited=0.0, evictions=0, resident=0, **others):
    reasons = {"demand": moved, "prefetch": 0, "migration": 0}
    stats = RuntimeStats(
        planned={"hi": hits + misses, "lo": 0, "skip": 0},
        hits=hits,
        misses=misses,
        hit_rate=0.0,
        promotions=0,
        reuses=0,
        evictions=evictions,
        bytes_moved=reasons,
        transfers={**reasons, "demand": misses},
        failed_transfers=0,
        exposed_wait_seconds=waited,
        prefetches={"useful": 0, "late": 0, "wasted": 0, "cancelled": 0},
        prefetch_interval={"prefill": 1, "decode": 1},
        predictions={"named": 0, "wanted": 0, "right": 0},
        predictor_bytes=1000,
        prediction_seconds=0.25,
        budget_bytes=1000,
        peak_expert_bytes=900,
        slots={"hi": 8},
        resident_experts={"hi": resident},
        choices={"hi": 0, "lo": 0},
        moves={"published": 0},
        windows=0,
        window_age_seconds=0.0,
        migration_link_seconds=0.0,
    )
    return stats.to_dict() | others


@pytest.fixture
def registry():
    return CollectorRegistry()


def samples(registry):
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (
            sample.name,
            *(sample.labels.get(key) for key in ("rank", "reason", "tier") if key in sample.labels),
        ): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_counters_grow_by_what_was_counted_and_gauges_follow(registry):
    statistics = Statistics("m", registry)
    statistics.record([answer(hits=3, misses=2, moved=20, resident=2), answer(hits=1)], 0.0)
    statistics.record([answer(hits=5, misses=6, moved=60, resident=1), answer(hits=1)], 1.0)
    found = samples(registry)
    assert found["vllm_dymoe_hits_total", "0"] == 5
    assert found["vllm_dymoe_hits_total", "1"] == 1
    assert found["vllm_dymoe_misses_total", "0"] == 6
    assert found["vllm_dymoe_transferred_bytes_total", "0", "demand"] == 60
    assert found["vllm_dymoe_resident_experts", "0", "hi"] == 1
    assert found["vllm_dymoe_slots", "0", "hi"] == 8


def test_a_tier_that_goes_out_of_use_has_no_slots(registry):
    statistics = Statistics("m", registry)
    statistics.record([answer(slots={"hi": 8, "lo": 4})], 0.0)
    statistics.record([answer(slots={"hi": 10})], 1.0)
    found = samples(registry)
    assert found["vllm_dymoe_slots", "0", "hi"] == 10
    assert found["vllm_dymoe_slots", "0", "lo"] == 0


def test_a_counter_never_falls_when_the_counts_are_reset(registry):
    statistics = Statistics("m", registry)
    statistics.record([answer(hits=5, waited=2.0)], 0.0)
    statistics.record([answer(hits=2, waited=0.5)], 1.0)
    found = samples(registry)
    assert found["vllm_dymoe_hits_total", "0"] == 7
    assert found["vllm_dymoe_exposed_wait_seconds_total", "0"] == 2.5


def test_every_count_of_the_runtime_is_a_metric(registry):
    Statistics("m", registry).record([answer()], 0.0)
    assert {metric.field for metric in METRICS} == set(answer()) - {"hit_rate"}
    assert {name for name, *_ in samples(registry)} == {metric.full_name for metric in METRICS}


def test_the_line_of_an_interval(registry):
    statistics = Statistics("m", registry)
    assert statistics.record([answer(hits=100), answer()], 10.0) is None, "the first interval has no beginning"
    later = [
        answer(hits=103, misses=1, moved=3 << 20, waited=0.5, evictions=4, resident=7),
        answer(misses=4, moved=1 << 20, waited=0.5, resident=8),
    ]
    assert statistics.record(later, 12.0) == (
        "vllm-dymoe: hit rate 37.5% of 8 experts, moved demand 2.0 MiB/s, prefetch 0 B/s, migration 0 B/s, "
        "waited 25.0% of the time, 4 evictions, resident experts hi 15 of 16 slots"
    )


def test_no_line_when_idle(registry):
    statistics = Statistics("m", registry)
    statistics.record([answer(hits=3)], 0.0)
    assert statistics.record([answer(hits=3)], 1.0) is None


class Engine:
    """As much of an engine as the statistics look at."""

    def __init__(self, quantization="dymoe", logs=True, client=0):
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(quantization=quantization, served_model_name="engine")
        )
        self.logger_manager = object() if logs else None
        self.engine_core = SimpleNamespace(client_index=client)
        self.asked = 0

    async def collective_rpc(self, method):
        assert method == "dymoe_stats"
        self.asked += 1
        return [answer(hits=1)]


def test_an_engine_keeps_its_statistics():
    engine = Engine()
    assert statistics_of(engine) is statistics_of(engine) is not None


@pytest.mark.parametrize("options", [{"quantization": "awq"}, {"logs": False}, {"client": 1}])
def test_nobody_is_asked_where_nothing_is_to_say(options):
    async def original(self):
        pass

    engine = Engine(**options)
    asyncio.run(patches._do_log_stats(original, engine))
    assert engine.asked == 0


def test_vllm_logs_first(monkeypatch):
    order = []
    monkeypatch.setattr(Statistics, "publish", lambda statistics, answers: order.append(answers[0]["hits"]))

    async def original(self):
        order.append("vllm")

    asyncio.run(patches._do_log_stats(original, Engine()))
    assert order == ["vllm", 1]


def test_counts_that_cannot_be_had_stop_nobody(monkeypatch):
    """An exception here would end vLLM's logging, and in LLM() the step."""
    warnings = []
    monkeypatch.setattr(metrics.logger, "warning", lambda text, *values: warnings.append(text % values))

    async def original(self):
        pass

    engine = Engine()
    engine.collective_rpc = lambda method: 1 / 0
    asyncio.run(patches._do_log_stats(original, engine))
    patches._do_log_stats(lambda self: None, engine)
    assert len(warnings) == 2
    assert "division by zero" in warnings[0]
