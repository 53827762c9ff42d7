"""With a real Prometheus: what it makes of the alerts, and what each expression gives on a server at work.

Where Prometheus is not installed (Debian: apt-get install prometheus) these tests are skipped.
VALUES=FILE keeps what the expressions gave, after a minute at work."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from demo import pair
from tests.observability.conftest import Service
from tests.observability.expressions import RULES, Expression, of_dashboard, of_rules

PATIENCE_SECONDS = 120  # only a hang can reach it
Gave = dict[tuple[str, str], list[dict[str, Any]]]  # by where an expression stands, and its text
KEPT_AFTER_SECONDS = 60
HERE = Path(__file__).parent
VARIABLES = {"$__rate_interval": "10s", "$job": "outrider", "$instance": ".*", "$model": pair.NAME}
# What has no series before a fault has happened. The dashboard shows 0 then.
RARE = {
    *("outrider_drafts_dropped_total", "outrider_drafts_ended_total", "outrider_verifiers_set_aside_total"),
    *("outrider_registrations_refused_total", "outrider_workers_cut_off_total"),
    "outrider_numerics_changes_total",
}


def measured(expression: str) -> bool:
    """Whether it must give something: a number alone says nothing."""
    metrics = Expression("", expression).metrics
    return bool(metrics) and not metrics & RARE


@pytest.fixture(scope="session")
def promtool() -> str:
    return installed("promtool")


def installed(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        pytest.skip(f"there is no {program}: apt-get install prometheus")
    return found


def test_the_alerts_are_well_formed(promtool: str) -> None:
    run = subprocess.run([promtool, "check", "rules", RULES], capture_output=True, text=True)
    assert run.returncode == 0 and "6 rules found" in run.stdout, run.stdout + run.stderr


def test_each_alert_fires_when_it_should(promtool: str) -> None:
    run = subprocess.run([promtool, "test", "rules", HERE / "alerts.yaml"], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def prometheus(service: Service, tmp_path: Path) -> Iterator[httpx.Client]:
    """One that asks the service's router every second, and knows the alerts."""
    program = installed("prometheus")
    target = service.url.removeprefix("http://")
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "outrider", "static_configs": [{"targets": [target]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    files = {"--config.file": tmp_path / "prometheus.yml", "--storage.tsdb.path": tmp_path / "data"}
    options = [f"{name}={file}" for name, file in files.items()]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([program, *options, f"--web.listen-address={address}"], stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=PATIENCE_SECONDS) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def values(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Returns the series that it gives now, each with its `metric` and its `value`, a finite number."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    try:
        answer = client.get("/api/v1/query", params={"query": expression}).json()
    except httpx.TransportError:  # it is about to listen
        return []
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    told = answer["data"]
    if told["resultType"] == "scalar":
        return [{"metric": {}, "value": float(told["result"][1])}]
    found = [{"metric": one["metric"], "value": float(one["value"][1])} for one in told["result"]]
    return [one for one in found if math.isfinite(one["value"])]


def keep(file: Path, client: httpx.Client, gave: Gave) -> None:
    version = client.get("/api/v1/status/buildinfo").json()["data"]["version"]
    told = [{"where": where, "expr": text, "gave": found} for (where, text), found in gave.items()]
    file.write_text(json.dumps({"prometheus": version, "values": told}, indent=1) + "\n")


def test_every_expression_gives_data_of_a_server_at_work(service: Service, prometheus: httpx.Client) -> None:
    expressions = [*of_dashboard(), *of_rules()]
    wanted = [(one.where, part) for one in expressions for part in one.operands if measured(part)]
    gave: Gave = {}
    until = time.monotonic() + PATIENCE_SECONDS
    while not values(
        prometheus, "up == 1"
    ):  # it takes some seconds to begin; the service need not work for that
        assert time.monotonic() < until, "Prometheus never asked the router"
        time.sleep(0.5)
    least = time.monotonic() + (KEPT_AFTER_SECONDS if os.environ.get("VALUES") else 0)
    with service.loaded():
        while (missing := [one for one in wanted if one not in gave]) or time.monotonic() < least:
            assert time.monotonic() < until, f"these gave nothing: {missing}"
            time.sleep(0.5)
            gave |= {one: found for one in missing if (found := values(prometheus, one[1]))}
        gave |= {one: found for one in wanted if (found := values(prometheus, one[1]))}  # all at one time
        alerts = prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
        assert {one["name"]: one["health"] for one in alerts} == {one.where: "ok" for one in of_rules()}
        assert not [one["name"] for one in alerts if one["state"] == "firing"]
    if file := os.environ.get("VALUES"):
        keep(Path(file), prometheus, gave)
    by_where = {where: found for (where, _), found in gave.items()}
    assert by_where["panel 'Verifiers'"][0]["value"] == by_where["panel 'Drafters'"][0]["value"] == 1
    assert by_where["panel 'Output tokens/s'"][0]["value"] > 0
    assert 0 < by_where["panel 'Drafts accepted'"][0]["value"] <= 1
