"""`outrider doctor` as a command: on a service that is well, and where much is wrong."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from outrider.client.connection import http_client
from outrider_cli.doctor import service as looking
from tests.certificates import Authority, flags
from tests.e2e.conftest import ROOT
from tests.e2e.two_routers import Role, free_port
from tests.observability.conftest import Service
from tests.redis_server import RedisServer

PATIENCE_SECONDS = 240  # only a hang can reach it
OF_MACHINE = {"cores", "vector units", "native code", "gpu", "engine"}  # as they are where the tests run


def doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    return subprocess.run(
        [sys.executable, "-m", "outrider_cli", "doctor", *options],
        cwd=ROOT,
        env=told | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_a_service_that_is_well(service: Service, tmp_path: Path) -> None:
    authority = Authority(days=(-1, 100))
    files = authority.write(tmp_path, "127.0.0.1")
    cert, key = authority.pair("127.0.0.1", days=(-1, 100))
    files.cert.write_bytes(cert)
    files.key.write_bytes(key)
    service.wait_until_well()
    with RedisServer() as redis:
        run = doctor(
            *("--url", service.url, "--device", "cpu", "--advertise", "127.0.0.1", "--port", free_port()),
            *flags(files),
            OUTRIDER_API_KEY=service.key,
            OUTRIDER_STORE=redis.url,
        )
    lines = run.stdout.splitlines()
    wrong = [line for line in lines if not line.startswith("ok  ")]
    assert {line[7:20].strip() for line in wrong} <= OF_MACHINE, run.stdout + run.stderr
    assert run.returncode == bool(wrong)
    checks = [line[7:20].strip() for line in lines]
    for check in (*OF_MACHINE, "python", "packages", "port", "certificate", "store", "router", "workers"):
        assert check in checks
    assert checks.count("clock") == 2 and "round trips" in checks
    assert any("1 verifier, 1 drafter" in line for line in lines)


def test_all_that_is_wrong_is_told_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()  # without a compiler
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = doctor(
            *("--json", "--port", port, "--url", "http://127.0.0.1:1", "--store", "redis://127.0.0.1:1"),
            *("--tls-cert", str(tmp_path / "no.pem"), "--tls-key", str(tmp_path / "no.key")),
            PATH=str(tmp_path / "bin"),
            XDG_CACHE_HOME=str(tmp_path / "cache"),
            ATEN_CPU_CAPABILITY="default",
        )
    told: dict[str, Any] = json.loads(run.stdout)
    assert run.returncode == 1 and told["ok"] is False
    wrong = {each["check"] for each in told["findings"] if not each["ok"]}
    of_processor = {"vector units", "native code"} if platform.machine() == "x86_64" else set()
    assert wrong >= of_processor | {"port", "certificate", "store", "router"}, run.stdout
    assert {each["check"] for each in told["findings"] if each["ok"]} >= {"python", "packages"}
    assert all(bool(each["todo"]) is not each["ok"] for each in told["findings"])
    if of_processor:  # so no kernel of ours is used
        assert "engine" in wrong


def test_options_that_do_not_go_together_are_a_line() -> None:
    run = doctor("--tls-cert", "cert.pem")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        "outrider doctor: --tls-cert is given without --tls-key: certificate and key belong together\n"
    )


def test_a_service_that_lacks_something(service: Service) -> None:
    service.wait_until_well()
    with http_client(None, None, 5.0) as http:
        (found,) = looking.service(http, service.url, time.time)
    assert "asks for an API key" in found.said and "--api-key" in found.todo
    with http_client(service.key, None, 5.0) as http:
        found = {each.check: each for each in looking.service(http, service.url, lambda: time.time() + 100)}
    assert "s ahead of the router's" in found["clock"].said and "NTP" in found["clock"].todo
    assert all(each.ok for check, each in found.items() if check != "clock")


def test_a_router_without_a_verifier_whose_certificate_ends_soon(tmp_path: Path) -> None:
    files = Authority().write(tmp_path)
    ports = ("--port", "0", "--grpc-port", "0", "--worker-port", "0")
    router = Role(("router", *ports, *flags(files)))
    router.start()
    try:
        url = router.address.replace("http://", "https://")
        with http_client(None, files.ca, 5.0) as http:
            found = {each.check: each for each in looking.service(http, url, time.time)}
        assert "ends in 1.0 days" in found["certificate"].said and found["certificate"].todo == "renew it"
        assert "no verifier" in found["workers"].said and "outrider verifier" in found["workers"].todo
        with http_client(None, None, 5.0) as http:
            (strange,) = looking.service(http, url, time.time)
        assert "not signed by an authority that is trusted here" in strange.said
    finally:
        router.end(signal.SIGKILL)
