"""How many spans of a router its collector did not get, among the router's own metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class Counting(Protocol):
    @property
    def dropped(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SpansDropped(Collector):
    """Tells what the sender of spans has counted."""

    sender: Counting

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "outrider_spans_dropped",
            "Spans that the collector did not get: too many waited, or it did not take them.",
            value=self.sender.dropped,
        )
