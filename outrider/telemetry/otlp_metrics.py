"""The metrics of a Prometheus registry, sent by OTLP under the same names: whatever has one has the other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    DataT,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

from outrider import __version__

EVERY_MS = 60_000  # by the specification
SCOPE = InstrumentationScope("outrider", __version__)
CREATED, TOTAL = "_created", "_total"  # after a counter's name
CUMULATIVE = AggregationTemporality.CUMULATIVE

Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Distribution:
    """A histogram's lines with the same labels."""

    up_to: list[tuple[float, int]] = field(default_factory=list)  # (bound, how many are at most that)
    sum: float = 0.0
    count: int = 0

    @property
    def bounds(self) -> list[float]:
        return [bound for bound, _ in self.up_to[:-1]]  # the last one is infinite

    @property
    def counts(self) -> list[int]:
        return [after - before for before, after in pairwise([0, *(total for _, total in self.up_to)])]


class MetricsSender:
    """Sends all metrics now and then, on a thread of its own, and once more at its end."""

    def __init__(self, exporter: MetricExporter, resource: Resource, registry: CollectorRegistry) -> None:
        self._exporter = exporter
        self._resource = resource
        self._registry = registry
        self._began = time.time_ns()
        self._over = threading.Event()
        self._every = float(os.environ.get("OTEL_METRIC_EXPORT_INTERVAL") or EVERY_MS) / 1000
        self._thread = threading.Thread(target=self._run, name="otlp-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._exporter.shutdown()

    def _run(self) -> None:
        while True:
            last = self._over.wait(self._every)
            metrics = list(converted(self._registry.collect(), self._began, time.time_ns()))
            scoped = ScopeMetrics(SCOPE, metrics, "")
            self._exporter.export(MetricsData([ResourceMetrics(self._resource, [scoped], "")]))
            if last:
                return


def converted(families: Iterable[Family], began: int, now: int) -> Iterator[Metric]:
    """Yields the metrics as OpenTelemetry has them; times in nanoseconds."""
    for family in families:
        samples = list(family.samples)
        since = {_labels(one): int(one.value * 1e9) for one in samples if one.name.endswith(CREATED)}
        kept = [one for one in samples if not one.name.endswith(CREATED)]
        name, data = family.name, _data(family.type, kept, since, began, now)
        if family.type == "counter":
            name += TOTAL
        if kept:
            yield Metric(name, family.documentation, "", data)


def _data(kind: str, samples: list[Sample], since: Mapping[Labels, int], began: int, now: int) -> DataT:
    if kind == "histogram":
        points = [
            HistogramDataPoint(
                dict(labels),
                since.get(labels, began),
                now,
                found.count,
                found.sum,
                found.counts,
                found.bounds,
                None,  # type: ignore[arg-type]  # neither is known
                None,  # type: ignore[arg-type]
            )
            for labels, found in _distributions(samples).items()
        ]
        return Histogram(points, CUMULATIVE)
    numbers = [NumberDataPoint(one.labels, since.get(_labels(one), began), now, one.value) for one in samples]
    return Sum(numbers, CUMULATIVE, True) if kind == "counter" else Gauge(numbers)


def _distributions(samples: Iterable[Sample]) -> Mapping[Labels, _Distribution]:
    found: dict[Labels, _Distribution] = {}
    for one in samples:
        of = found.setdefault(_labels(one), _Distribution())
        if one.name.endswith("_bucket"):
            of.up_to.append((float(one.labels["le"]), int(one.value)))
        elif one.name.endswith("_sum"):
            of.sum = one.value
        elif one.name.endswith("_count"):
            of.count = int(one.value)
    return found


def _labels(sample: Sample) -> Labels:
    return tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
