"""Who may reach what listens, and what is overridden so that it is nobody."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from deploy.loopback import HOST_VARIABLE, Listener, unasked

OVERRIDDEN = """
from deploy.loopback import keep_to_loopback
keep_to_loopback()
from ray.serve._private.haproxy import HAPROXY_CONFIG_TEMPLATE
print(HAPROXY_CONFIG_TEMPLATE)
"""


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.0.0.2", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_loopback_is_what_this_machine_alone_reaches(host: str, local: bool) -> None:
    assert Listener(host, 1, "a").local is local


def test_what_was_asked_for_is_an_address_and_its_ports() -> None:
    found = [Listener("0.0.0.0", port, "haproxy") for port in (8000, 9000, 8404)]
    found += [Listener("::", 8000, "ray"), Listener("127.0.0.1", 7, "ray")]
    left = unasked(found, "0.0.0.0", (8000, 9000))
    assert [(one.host, one.port) for one in left] == [("0.0.0.0", 8404), ("::", 8000)]


def test_haproxy_binds_loopback_and_the_api() -> None:
    environment = {**os.environ, HOST_VARIABLE: "10.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", OVERRIDDEN], env=environment, capture_output=True, text=True, check=True
    )
    binds = re.findall(r"\bbind (.+?):{{ config\.(\w+) }}", done.stdout)
    assert {port: host for host, port in binds} == {
        "frontend_port": "10.0.0.1",
        "grpc_frontend_port": "10.0.0.1",
        "stats_port": "127.0.0.1",
        "metrics_port": "127.0.0.1",
    }
    assert len(binds) == len(re.findall(r"^ *bind ", done.stdout, re.MULTILINE))
    assert done.stdout.count("\n    timeout http-request 10s\n") == 1
    assert done.stdout.count("\n    tcp-request connection reject if { sc0_conn_cur gt 1024 }\n") == 2
