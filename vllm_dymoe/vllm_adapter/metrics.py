"""The runtime's counts on vLLM's own ``/metrics``, and as one line in its log.

At vLLM's statistics interval the front end asks the workers through ``collective_rpc``: it reaches every rank in every
process, adds no work to a step, and leaves vLLM's metrics as they are. ``PROMETHEUS_MULTIPROC_DIR`` would have to be
set before anything imports prometheus_client, and would change how all of vLLM's metrics are kept.
"""

import contextlib
import inspect
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from vllm_dymoe.units import size
from vllm_dymoe.vllm_adapter.report import logger

Answer = dict[str, Any]  # of dymoe_stats: a RuntimeStats as data
NAMESPACE = "vllm_dymoe"


@dataclass(frozen=True)
class Metric:
    """One metric, for each rank.

    Attributes:
        name: without the namespace, and without the ``_total`` of a counter.
        kind: Counter or Gauge.
        field: of RuntimeStats.
        meaning: its help text.
        label: names the keys where the field is a dictionary.
    """

    name: str
    kind: type[Counter] | type[Gauge]
    field: str
    meaning: str
    label: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all labels."""
        return ("model_name", "rank") + ((self.label,) if self.label else ())

    @property
    def full_name(self) -> str:
        """As ``/metrics`` shows it."""
        return f"{NAMESPACE}_{self.name}" + ("_total" if self.kind is Counter else "")

    def values(self, answer: Answer) -> dict[tuple[str, ...], float]:
        """The value in an answer, or one for each key of its label."""
        value = answer.get(self.field, {})
        return {(key,): amount for key, amount in value.items()} if isinstance(value, dict) else {(): value}


METRICS = (
    Metric("planned", Counter, "planned", "Experts that the system gave each tier.", "tier"),
    Metric("hits", Counter, "hits", "Experts that a layer needed and found on the device."),
    Metric("misses", Counter, "misses", "Experts that a layer needed and had to fetch."),
    Metric("promotions", Counter, "promotions", "Misses that replaced a low version by a high one."),
    Metric("reuses", Counter, "reuses", "Hits that used a high version where a low one would have done."),
    Metric("evictions", Counter, "evictions", "Experts that made room for others."),
    Metric("transfers", Counter, "transfers", "Blobs moved from host to device.", "reason"),
    Metric("transferred_bytes", Counter, "bytes_moved", "Bytes moved from host to device.", "reason"),
    Metric("failed_transfers", Counter, "failed_transfers", "Transfers that ended in an error."),
    Metric("exposed_wait_seconds", Counter, "exposed_wait_seconds", "Host time spent waiting for transfers."),
    Metric("prefetches", Counter, "prefetches", "Experts fetched ahead, by what became of them.", "outcome"),
    Metric("predictions", Counter, "predictions", "Experts named ahead, wanted by routers, and right: both.", "kind"),
    Metric("prediction_seconds", Counter, "prediction_seconds", "Host time spent on predicting experts."),
    Metric("predictor_bytes", Gauge, "predictor_bytes", "Device memory of the predictor, within the budget."),
    Metric("prefetch_interval", Gauge, "prefetch_interval", "One of so many predictions is acted on.", "phase"),
    Metric("budget_bytes", Gauge, "budget_bytes", "The hard limit of device memory for experts."),
    Metric("peak_expert_bytes", Gauge, "peak_expert_bytes", "The most device memory that experts ever held."),
    Metric("slots", Gauge, "slots", "Slots for experts on the device.", "tier"),
    Metric("resident_experts", Gauge, "resident_experts", "Experts that are complete on the device.", "tier"),
    Metric("choices", Counter, "choices", "Choices of routers by what served them, where versions move.", "tier"),
    Metric("moves", Counter, "moves", "Experts moved to the high version between steps.", "outcome"),
    Metric("windows", Counter, "windows", "Windows of traffic after which high experts were chosen anew."),
    Metric("window_age_seconds", Gauge, "window_age_seconds", "Age of the running window."),
    Metric("migration_link_seconds", Counter, "migration_link_seconds", "Time that the link worked for moves."),
)


class Statistics:
    """What one engine's ranks did, published at each interval."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model_name = model_name
        self._collectors = _collectors(registry)
        self._before: list[Answer] = []
        self._time: float | None = None

    def publish(self, answers: list[Answer]) -> None:
        """Publish the counts of all ranks now, and log the interval if an expert was needed in it."""
        text = self.record(answers, time.monotonic())
        if text is not None:
            logger.info("%s", text)

    def record(self, answers: list[Answer], now: float) -> str | None:
        """Publish the counts of all ranks.

        Args:
            answers: of ``dymoe_stats``, in the order of ranks.
            now: seconds on a monotonic clock.

        Returns:
            The interval in one line; None if it is the first or no expert was needed.
        """
        before = self._before or [{} for _ in answers]
        for rank, (answer, earlier) in enumerate(zip(answers, before, strict=True)):
            for metric, collector in self._collectors.items():
                known, values = metric.values(earlier), metric.values(answer)
                for key in known | values:  # a tier that is no longer in use has 0
                    child = collector.labels(self._model_name, str(rank), *key)
                    if isinstance(child, Counter):
                        child.inc(_grown(values.get(key, 0), known.get(key, 0)))
                    else:
                        child.set(values.get(key, 0))
        text = None if self._time is None else _describe(answers, before, now - self._time)
        self._before, self._time = answers, now
        return text


def _describe(answers: list[Answer], before: list[Answer], seconds: float) -> str | None:
    """An interval in one line, sums over all ranks; None if no expert was needed."""

    def total(name: str, key: str | None = None) -> float:
        pairs = ((new[name], old[name]) for new, old in zip(answers, before, strict=True))
        return sum(_grown(new, old) if key is None else _grown(new[key], old[key]) for new, old in pairs)

    hits, misses = total("hits"), total("misses")
    if hits + misses == 0:
        return None
    moved = ", ".join(
        f"{reason} {size(total('bytes_moved', reason) / seconds)}/s" for reason in answers[0]["bytes_moved"]
    )
    resident = ", ".join(
        f"{tier} {sum(a['resident_experts'][tier] for a in answers)} of {sum(a['slots'][tier] for a in answers)} slots"
        for tier in answers[0]["slots"]
    )
    return (
        f"vllm-dymoe: hit rate {hits / (hits + misses):.1%} of {hits + misses:.0f} experts, moved {moved}, "
        f"waited {total('exposed_wait_seconds') / seconds / len(answers):.1%} of the time, "
        f"{total('evictions'):.0f} evictions, resident experts {resident}"
    )


def _grown(value: float, before: float) -> float:
    """How much a count grew; one that fell was set to zero in between."""
    return value - before if value >= before else value


def statistics_of(engine: Any) -> Statistics | None:
    """The statistics of an AsyncLLM or LLMEngine.

    Returns:
        None if its model is not ours, its statistics are off, or another server process of the same engine has them.
    """
    config = engine.vllm_config.model_config
    if engine.logger_manager is None or config.quantization != "dymoe":
        return None
    if getattr(engine.engine_core, "client_index", 0) != 0:
        return None
    if engine not in _statistics:
        _statistics[engine] = Statistics(config.served_model_name)
    return _statistics[engine]


def publish(engine: Any, logged: Awaitable[None] | None) -> Awaitable[None] | None:
    """Publish the counts of an engine's ranks after vLLM's own log, which AsyncLLM awaits like its workers' answers."""
    if inspect.isawaitable(logged):
        return _publish_later(engine, logged)
    with _serving_goes_on():
        if (statistics := statistics_of(engine)) is not None:
            statistics.publish(engine.collective_rpc("dymoe_stats"))
    return None


async def _publish_later(engine: Any, logged: Awaitable[None]) -> None:
    await logged
    with _serving_goes_on():
        if (statistics := statistics_of(engine)) is not None:
            statistics.publish(await engine.collective_rpc("dymoe_stats"))


@contextlib.contextmanager
def _serving_goes_on() -> Iterator[None]:
    """Say what went wrong inside instead of raising it: vLLM's own statistics, and in ``LLM()`` its steps, go on."""
    try:
        yield
    except Exception as error:
        logger.warning("vllm-dymoe: the workers' counts could not be read and are missing from /metrics: %s", error)


_statistics: WeakKeyDictionary[Any, Statistics] = WeakKeyDictionary()


@cache
def _collectors(registry: CollectorRegistry) -> dict[Metric, Counter | Gauge]:
    """Every metric, registered once however many engines a process has."""

    def collector(metric: Metric) -> Counter | Gauge:
        mode = {"multiprocess_mode": "mostrecent"} if metric.kind is Gauge else {}
        options: dict[str, Any] = {"namespace": NAMESPACE, "registry": registry, **mode}
        return metric.kind(metric.name, metric.meaning, metric.labels, **options)

    return {metric: collector(metric) for metric in METRICS}
