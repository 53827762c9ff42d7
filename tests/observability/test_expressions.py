"""Dashboard and alerts name what a router measures: who renames a metric or a label finds them here."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import yaml

from router.metrics import Metrics
from tests.observability.expressions import (
    OBSERVABILITY,
    Expression,
    dashboard,
    of_dashboard,
    of_rules,
    rules,
)

OF_PROMETHEUS = {"job", "instance", "le"}
EXPRESSIONS = [*of_dashboard(), *of_rules()]
# Their model_name is a draft model's, and $model a target's.
OF_DRAFT_MODELS = {"outrider_draft_rejections_total", "outrider_draft_rejections_covered_total"}
VARIABLES = {"datasource", "job", "instance", "model"}


def measured() -> dict[str, set[str]]:
    """The labels of every series that a router can have, by its name."""
    return {
        name: set(getattr(collector, "_labelnames", ()))
        for name, collector in Metrics().registry._names_to_collectors.items()
    }


def wrong(expression: Expression, known: dict[str, set[str]]) -> list[str]:
    """What it names that is not measured."""
    metrics = expression.metrics
    labels = OF_PROMETHEUS.union(*(known.get(name, set()) for name in metrics))
    return sorted((metrics - known.keys()) | (expression.labels - labels))


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=lambda one: one.where)
def test_its_metrics_and_labels_are_measured(expression: Expression) -> None:
    assert expression.metrics, "no metric was found in it"
    assert wrong(expression, measured()) == []


def test_a_metric_or_label_that_is_renamed_is_found() -> None:
    known = measured()
    labels = known.pop("outrider_workers")
    renamed = {**known, "outrider_workers_connected": labels}
    assert {name for one in EXPRESSIONS for name in wrong(one, renamed)} == {"outrider_workers", "role"}
    relabelled = {name: {"worker" if one == "engine" else one for one in has} for name, has in known.items()}
    found = {name for one in EXPRESSIONS for name in wrong(one, {**relabelled, "outrider_workers": labels})}
    assert found == {"engine"}
    assert wrong(Expression("", "sum by (fate) (rate(outrider_steps_total[5m]))"), known) == [
        "fate",
        "outrider_steps_total",
    ]


def test_what_is_compared_is_told_apart() -> None:
    text = 'sum(a{x=">"}) / b < 2 * (c > d) and on (e) f == 1 unless max by (and) (g) > 0.5'
    assert Expression("", text).operands == [
        'sum(a{x=">"}) / b',
        "2 * (c > d)",
        "f",
        "1",
        "max by (and) (g)",
        "0.5",
    ]


def test_the_dashboard_is_for_any_data_source_job_router_and_model() -> None:
    told = dashboard()
    assert {one["name"] for one in told["templating"]["list"]} == VARIABLES
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in told["panels"]:
        if panel["type"] != "row":
            assert panel["datasource"] == source and panel["description"]
            assert all(target["datasource"] == source for target in panel["targets"])
    for expression in of_dashboard():
        for metric, selector in re.findall(r"([\w:]+)\{([^}]*)\}", expression.text):
            chosen = set(selector.split(", "))
            assert {'job=~"$job"', 'instance=~"$instance"'} <= chosen
            of_target = "model_name" in measured()[metric] and metric not in OF_DRAFT_MODELS
            assert ('model_name=~"$model"' in chosen) is of_target, expression
        assert set(re.findall(r"\[([^]]*)\]", expression.text)) <= {"$__rate_interval"}
        assert set(re.findall(r"\$(\w+)", expression.text)) <= VARIABLES | {"__rate_interval"}


def test_panels_have_names_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places = Counter(
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    )
    assert max(places.values()) == 1 and max(x for x, _ in places) < 24


def test_the_operator_gets_the_same_alerts() -> None:
    resource = yaml.safe_load((OBSERVABILITY / "prometheusrule.yaml").read_text())
    plain = yaml.safe_load((OBSERVABILITY / "prometheus-rules.yaml").read_text())
    assert resource["spec"] == plain


def test_each_alert_is_seen_firing_and_quiet() -> None:
    """By `promtool test rules`, where it is installed."""
    cases = yaml.safe_load((OBSERVABILITY.parents[1] / "tests" / "observability" / "alerts.yaml").read_text())
    seen = [case for test in cases["tests"] for case in test["alert_rule_test"]]
    for rule in rules():
        assert {bool(case["exp_alerts"]) for case in seen if case["alertname"] == rule["alert"]} == {
            True,
            False,
        }
