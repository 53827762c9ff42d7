"""The expressions of the dashboard and of the alerts, and which metrics and labels each names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

OBSERVABILITY = Path(__file__).parents[2] / "deploy" / "observability"
DASHBOARD = OBSERVABILITY / "grafana-dashboard.json"
RULES = OBSERVABILITY / "prometheus-rules.yaml"
# Words of PromQL, as far as they are used here, that are no metrics.
WORDS = {"by", "on", "and", "unless", "or", "ignoring", "group_left", "vector"} | {
    *("sum", "max", "min", "rate", "increase", "histogram_quantile", "avg_over_time", "max_over_time")
}
GROUPED = re.compile(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)")
SELECTOR = re.compile(r"\{([^}]*)\}")
COMPARED = re.compile(r" (?:==|!=|>=|<=|>|<) ")
SETS = re.compile(r" (?:and|unless|or)\b(?: on \([^)]*\))? ")


@dataclass(frozen=True)
class Expression:
    """One of them."""

    where: str  # for who reads a failure
    text: str
    legend: str = ""

    @property
    def metrics(self) -> set[str]:
        bare = SELECTOR.sub("", GROUPED.sub("", re.sub(r"\[[^]]*\]", "", self.text)))
        return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS

    @property
    def labels(self) -> set[str]:
        """Those that it selects or groups by, and its legend's."""
        grouped = {name for found in GROUPED.findall(self.text) for name in re.findall(r"\w+", found)}
        selected = {name for found in SELECTOR.findall(self.text) for name in re.findall(r"(\w+)\s*=", found)}
        return grouped | selected | set(re.findall(r"\{\{(\w+)\}\}", self.legend))

    @property
    def operands(self) -> list[str]:
        """What is compared and joined, each by itself: an alert that is quiet has no value as a whole."""
        return [side for part in _split(self.text, SETS) for side in _split(part, COMPARED)]


def _split(text: str, at: re.Pattern[str]) -> Iterator[str]:
    """Yields the parts between matches outside of any bracket."""
    start = 0
    for found in at.finditer(text):
        before = text[: found.start()]
        if all(before.count(a) == before.count(b) for a, b in ("()", "{}", "[]")):
            yield text[start : found.start()].strip()
            start = found.end()
    yield text[start:].strip()


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def rules() -> list[Any]:
    (group,) = yaml.safe_load(RULES.read_text())["groups"]
    found: list[Any] = group["rules"]
    return found


def of_dashboard() -> list[Expression]:
    return [
        Expression(f"panel {panel['title']!r}", target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


def of_rules() -> list[Expression]:
    return [Expression(rule["alert"], rule["expr"]) for rule in rules()]
