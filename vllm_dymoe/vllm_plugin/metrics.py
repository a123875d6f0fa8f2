"""The server's counters on vLLM's own ``/metrics``, and as one line in its log.

At vLLM's statistics interval the front end asks the workers through ``collective_rpc``, which adds no work to a step.
``PROMETHEUS_MULTIPROC_DIR`` would change how all of vLLM's metrics are stored.
"""

import contextlib
import inspect
import time
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from vllm.utils.import_utils import resolve_obj_by_qualname

from vllm_dymoe.server.stats import ServerStats, total
from vllm_dymoe.vllm_plugin.announcements import in_words, logger
from vllm_dymoe.vllm_plugin.rank_calls import call_ranks, patience

Answer = dict[str, Any]  # of dymoe_stats: a ServerStats as data
NAMESPACE = "vllm_dymoe"


@dataclass(frozen=True)
class Metric:
    """A field of ServerStats as a metric with a label for the rank.

    It is a Counter unless it is a gauge.
    """

    field: str
    meaning: str
    label: str | None
    gauge: bool
    name: str

    @property
    def labels(self) -> tuple[str, ...]:
        return ("model_name", "rank") + ((self.label,) if self.label else ())

    @property
    def full_name(self) -> str:
        return f"{NAMESPACE}_{self.name}" + ("" if self.gauge else "_total")

    def values(self, answer: Answer) -> dict[tuple[str, ...], float]:
        value = answer[self.field]
        return {(key,): amount for key, amount in value.items()} if isinstance(value, dict) else {(): value}


METRICS = tuple(
    Metric(field.name, **{"name": field.name, **field.metadata}) for field in fields(ServerStats) if field.metadata
)
_GAUGES = frozenset(metric.field for metric in METRICS if metric.gauge)


def difference(after: Answer, before: Answer) -> Answer:
    """Return what a rank counted between two answers.

    A counter that fell was reset. Gauges are those of ``after``.
    """

    def change(value: Any, earlier: Any, gauge: bool) -> Any:
        if isinstance(value, dict):
            earlier = earlier or {}
            return {key: change(value.get(key, 0), earlier.get(key, 0), gauge) for key in earlier | value}
        return value if gauge or value < earlier else value - earlier

    return {name: change(value, before.get(name, 0), name in _GAUGES) for name, value in after.items()}


class Statistics:
    """Statistics of one engine's ranks, published at each interval."""

    def __init__(self, model_name: str, registry: CollectorRegistry = REGISTRY) -> None:
        self._model_name = model_name
        self._collectors = _collectors(registry)
        self._before: list[Answer] = []
        self._time: float | None = None

    def publish(self, answers: list[Answer]) -> None:
        """Publish the counts of all ranks now.

        The interval is logged if an expert was needed in it.
        """
        if text := self.record(answers, time.monotonic()):
            logger.info("%s", text)

    def record(self, answers: list[Answer], now: float) -> str | None:
        """Publish at a time in seconds; return the interval as a line.

        None for the first interval, and for one without experts.
        """
        before = self._before or [{} for _ in answers]
        changes = [difference(answer, earlier) for answer, earlier in zip(answers, before, strict=True)]
        for rank, changed in enumerate(changes):
            for metric, collector in self._collectors.items():
                for key, value in metric.values(changed).items():
                    child = collector.labels(self._model_name, str(rank), *key)
                    child.inc(value) if isinstance(child, Counter) else child.set(value)
        counted = ServerStats(**total(changes))
        text = None
        if self._time is not None and counted.hits + counted.misses:
            said = "; ".join(f"{name} {value}" for name, value in in_words(counted).items())
            text = f"vllm-dymoe: in {now - self._time:.1f} s {said}"
        self._before, self._time = answers, now
        return text


def statistics_of(engine: Any) -> Statistics | None:
    """Return the statistics of an AsyncLLM or LLMEngine.

    None for other models, if statistics are off or in another process, or if the workers lack our methods.
    """
    config = engine.vllm_config.model_config
    if engine.logger_manager is None or config.quantization != "dymoe":
        return None
    if getattr(engine.engine_core, "client_index", 0) != 0:
        return None
    extension = engine.vllm_config.parallel_config.worker_extension_cls  # may be a user's own
    if not hasattr(resolve_obj_by_qualname(extension), "dymoe_stats"):
        return None
    if engine not in _statistics:
        _statistics[engine] = Statistics(config.served_model_name)
    return _statistics[engine]


def publish(engine: Any, logged: Awaitable[None] | None) -> Awaitable[None] | None:
    """Publish the counts of an engine's ranks after vLLM's own log.

    AsyncLLM awaits that log and its workers' answers; LLMEngine waits for the answers here.
    """
    if inspect.isawaitable(logged):
        return _publish_later(engine, logged)
    with _serving_goes_on():
        if (statistics := statistics_of(engine)) is not None:
            statistics.publish(engine.collective_rpc("dymoe_stats", patience()))
    return None


async def _publish_later(engine: Any, logged: Awaitable[None]) -> None:
    await logged
    with _serving_goes_on():
        if (statistics := statistics_of(engine)) is not None:
            statistics.publish(await call_ranks(engine, "dymoe_stats", {}, timeout=patience()))


@contextlib.contextmanager
def _serving_goes_on() -> Iterator[None]:
    """Log an error inside this context instead of raising it.

    So vLLM's statistics, and steps in ``LLM()``, continue.
    """
    try:
        yield
    except Exception as error:
        logger.warning("vllm-dymoe: the workers' counts could not be read and are missing from /metrics: %s", error)


_statistics: WeakKeyDictionary[Any, Statistics] = WeakKeyDictionary()


@cache
def _collectors(registry: CollectorRegistry) -> dict[Metric, Counter | Gauge]:
    def collector(metric: Metric) -> Counter | Gauge:
        about = metric.name, metric.meaning, metric.labels, NAMESPACE
        if metric.gauge:
            return Gauge(*about, registry=registry, multiprocess_mode="mostrecent")
        return Counter(*about, registry=registry)

    return {metric: collector(metric) for metric in METRICS}
