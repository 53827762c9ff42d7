"""`outrider doctor`: each thing that it looks at as it should be, and wrong."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch
from redis import Redis
from redis.exceptions import OutOfMemoryError

from outrider import __version__
from outrider.client.connection import http_client
from outrider.engine import native
from outrider.options.protection import TlsFiles
from outrider.store.redis_health import RedisHealth
from outrider_cli.doctor import certificates, devices, ports, processor, service, store, versions
from outrider_cli.doctor.clock import clock_against
from outrider_cli.doctor.finding import Finding
from tests.certificates import Authority
from tests.observability.test_top import later
from tests.redis_server import PASSWORD, RedisServer

HEALTHY = RedisHealth((7, 0, 15), "standalone", "master", 0, "noeviction", 0, 1000.0, 1000.0, 0.001)
ROUTER_UP = httpx.Response(200, text="ready\n")


def one(found: list[Finding]) -> Finding:
    (only,) = found
    return only


def wrong(found: list[Finding] | Finding, said: str, todo: str) -> bool:
    """Whether one of them is wrong, and says both."""
    found = [found] if isinstance(found, Finding) else found
    return any(not each.ok and said in each.said and todo in each.todo for each in found)


def test_versions_are_those_that_the_project_asks_for() -> None:
    python, packages = versions.asked_for()
    assert versions.python(python).ok and wrong(versions.python(python, "3.10.2"), "3.10.2", "another")
    assert one(versions.packages(packages)).ok and "torch" in str(one(versions.packages(packages)))
    assert any(each.startswith("grpcio>=") for each in packages)
    assert wrong(versions.packages(["torch>=99"]), f"torch is {metadata.version('torch')}", "'torch>=99'")
    assert wrong(
        versions.packages(["nobodys-package>=1"]), "is not installed", "pip install 'nobodys-package>=1'"
    )
    other = ['nobodys-package>=1; extra == "ray"', 'nobodys-package; python_version < "3"']
    assert one(versions.packages([*packages, *other])).ok
    assert one(versions.packages(["torch>=2.9"], lambda _: "2.11.0+cu130")).ok


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", None), ("1600000 100000", None), ("", None), ("150000 100000", 1), ("350000 100000", 3)],
)
def test_threads_fit_into_what_a_container_may_use(tmp_path: Path, quota: str, threads: int | None) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    found = processor.cores(tmp_path / "cpu.max", seen=16)
    assert found.ok if threads is None else wrong(found, "16 are seen", f"--threads {threads},")
    assert processor.cores(tmp_path / "nothing", seen=16).ok


COMPILERS = {
    "fails": ("echo 'fatal error: no thread.h' >&2; exit 1", "fatal error: no thread.h", "knows C++17"),
    "makes what is no library": (
        'for file; do :; done; echo no library > "$file"',
        "cannot be loaded",
        "delete",
    ),
}


@pytest.mark.parametrize("how", [*COMPILERS, "is missing"])
def test_a_compiler_that(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.platform, "machine", lambda: processor.OURS)
    monkeypatch.setattr(processor.native, "suits", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if how in COMPILERS else str(tmp_path))
    if how in COMPILERS:
        script, said, todo = COMPILERS[how]
        (tmp_path / "g++").write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{script}\n')
        (tmp_path / "g++").chmod(0o700)
    else:
        said, todo = "there is no g++ or clang++", "apt-get install g++"
    assert wrong(processor.native_code(), said, todo)


def test_gpus_that_torch_cannot_use(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use the GPU of this machine")
    assert one(devices.gpus(tmp_path / "none")).ok
    (tmp_path / "0000:01:00.0").mkdir()
    assert wrong(devices.gpus(tmp_path), f"torch {torch.__version__}, built", "install a torch for CUDA")
    assert wrong(devices.engine("cuda"), "no model runs on cuda", "another --device")


def test_gpus_that_torch_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would say of an H100, and of a newer one."""
    about = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    found = devices.gpus()
    assert all(each.ok for each in found) and found[1].said.startswith("1: H100, 60GiB of 80GiB free")
    about.major = 12
    assert wrong(devices.gpus(), "is not built for it", "install a torch that is")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86", "sm_90a"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((7, 0), ["sm_80", "compute_90"], False),
        ((10, 0), ["sm_100"], True),
    ],
)
def test_which_gpus_a_torch_is_built_for(
    capability: tuple[int, int], architectures: list[str], runs: bool
) -> None:
    assert devices.built_for(*capability, architectures) is runs


def test_a_model_that_does_not_run(tmp_path: Path) -> None:
    assert wrong(devices.engine("cpu", str(tmp_path)), "no model runs on cpu", "--device")


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert wrong(ports.port("127.0.0.1", number), f"{number} at 127.0.0.1", "another port")
    assert ports.port("127.0.0.1", number).ok
    assert wrong(ports.port("192.0.2.1", number), "192.0.2.1 cannot be used", "address of this machine")
    assert "1024" in ports._todo(errno.EACCES)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@contextmanager
def configured(redis: RedisServer, **options: str) -> Iterator[None]:
    """With these options of the server, which has none of them otherwise."""
    usual = {"maxmemory": "0", "maxmemory-policy": "noeviction"}
    with Redis(port=redis.port, password=PASSWORD) as client:
        for name, value in options.items():
            client.config_set(name.replace("_", "-"), value)
        try:
            yield
        finally:
            for name, value in usual.items():
                client.config_set(name, value)


def looked_at(redis: RedisServer, off: float = 0.0) -> list[Finding]:
    return store.store(redis.url, lambda: time.time() + off)


def test_a_store_that_will_do(redis: RedisServer) -> None:
    assert [each.check for each in looked_at(redis) if each.ok] == ["store", "clock"]
    with configured(redis, maxmemory="512mb", maxmemory_policy="volatile-lru"):
        found = looked_at(redis)
    assert all(each.ok for each in found) and "volatile-lru" in found[0].said


def test_what_a_store_keeps_and_throws_away(redis: RedisServer) -> None:
    with configured(redis, maxmemory_policy="allkeys-lru"):
        assert wrong(looked_at(redis), "allkeys-lru: it may forget registrations", "volatile-lru")
    with configured(redis, maxmemory="1gb"):
        assert wrong(looked_at(redis), "noeviction: when it is full", "volatile-lru")
    with configured(redis, maxmemory="64mb", maxmemory_policy="volatile-lru"):
        assert wrong(looked_at(redis), "maxmemory is 64MiB", "320MiB or more")
    with Redis(port=redis.port, password=PASSWORD) as client:
        client.set("key", "x" * 2**20, ex=600)
        full = configured(redis, maxmemory_policy="volatile-lru", maxmemory="1mb")
        with full, suppress(OutOfMemoryError):  # what it throws away may not be enough
            client.set("other", "y")
        assert wrong(looked_at(redis), "keys away for want of room: 1", "more maxmemory")
        client.config_resetstat()
        client.flushall()


def test_a_replica_is_no_store(redis: RedisServer) -> None:
    with Redis(port=redis.port, password=PASSWORD) as client:
        client.replicaof("127.0.0.1", "1")
        try:
            assert wrong(looked_at(redis), "it is a replica", "that it follows")
        finally:
            client.replicaof("NO", "ONE")


def test_a_store_that_does_not_answer(redis: RedisServer) -> None:
    stranger = redis.url.replace("open%20", "shut%20")
    assert wrong(store.store(stranger, time.time), "does not accept this user name and password", "")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nobody = f"redis://127.0.0.1:{probe.getsockname()[1]}"
    assert wrong(store.store(nobody, time.time), "cannot be reached", "look whether it runs")
    assert wrong(store.store("redis://", time.time), "names no host", "")


@pytest.mark.parametrize(
    ("change", "said", "todo"),
    [
        ({"version": (6, 0, 16)}, "a Redis 6.0.16", "6.2 or newer"),
        ({"mode": "cluster"}, "Redis Cluster", "a Redis alone"),
        ({"round_trip": 0.2}, "takes 200 ms", "nearer"),
    ],
)
def test_a_redis_of_another_kind(change: dict[str, object], said: str, todo: str) -> None:
    assert not list(store._wrong(HEALTHY))
    assert wrong(list(store._wrong(replace(HEALTHY, **change))), said, todo)  # type: ignore[arg-type]


def test_clocks_that_are_apart(redis: RedisServer) -> None:
    assert wrong(looked_at(redis, off=100.0), "s ahead of the store's", "NTP")
    assert wrong(looked_at(redis, off=-100.0), "s behind the store's", "NTP")
    assert clock_against("it", 11.5, 10.0, 0.0).ok and not clock_against("it", 12.5, 10.0, 0.0).ok
    assert clock_against("it", 12.5, 10.0, 1.0).ok


def certified(files: TlsFiles, *names: str) -> list[Finding]:
    return certificates.certificates(files, list(names), time.time())


def test_certificates_in_force(tmp_path: Path) -> None:
    authority = Authority(days=(-1, 100))
    files = authority.write(tmp_path, "worker.example", "10.0.0.1")
    assert wrong(certified(files), "ends in 1.0 days", "renew it")  # the certificate
    files.cert.write_bytes((pair := authority.pair("worker.example", "10.0.0.1", days=(-1, 50)))[0])
    files.key.write_bytes(pair[1])
    said = one(certified(files, "worker.example")).said
    assert "belong together, for 10.0.0.1, worker.example, 50 days yet" in said
    assert one(certified(files, "10.0.0.1")).ok
    assert wrong(certified(files, "other.example"), "not for other.example", "subjectAltName")
    short = Authority(days=(-1, 5))
    files = short.write(tmp_path / "short")
    files.cert.write_bytes((pair := short.pair("localhost", days=(-1, 50)))[0])
    files.key.write_bytes(pair[1])
    assert wrong(certified(files), f"{files.ca} ends in 5.0 days", "renew it")


def test_certificates_that_nobody_takes(tmp_path: Path) -> None:
    authority, other = Authority(days=(-9, 100)), Authority(days=(-9, 100))
    files = authority.write(tmp_path)
    todo = "belong together"
    assert wrong(certified(TlsFiles(files.cert, files.key, tmp_path / "no")), "no such file", todo)
    cert, key = authority.pair("localhost", days=(-9, -1))
    files.cert.write_bytes(cert)
    assert wrong(certified(files), "is not the key of the certificate", todo)
    files.key.write_bytes(key)
    assert wrong(certified(files), "certificate has expired", todo)
    cert, key = other.pair("localhost", days=(-1, 100))
    files.cert.write_bytes(cert)
    files.key.write_bytes(key)
    assert wrong(certified(files), str(files.cert), todo)


def test_what_a_router_says_of_itself() -> None:
    assert service._router(__version__, ROUTER_UP, 0.001).ok
    assert wrong(
        service._router("9.9", ROUTER_UP, 0.001), f"9.9, 1.00 ms away, and this is {__version__}", "same"
    )
    degraded = httpx.Response(200, text="ready, degraded: the store is away\n")
    assert wrong(service._router(__version__, degraded, 0.001), "the store is away", "doctor --store")
    packed = httpx.Response(200, content=b"x", headers={"content-type": "text/plain; charset=zlib"})
    assert service._router(__version__, packed, 0.001).ok


@pytest.mark.parametrize("date", ["", "yesterday", f"1 Jan {'9' * 20} 00:00:00 GMT"])
def test_a_date_that_is_none_is_passed_over(date: str) -> None:
    assert not list(service._clock(httpx.Response(200, headers={"date": date}), 0.0, 0.001))


def test_round_trips_between_workers() -> None:
    def trips(*seconds: float, step: float) -> list[Finding]:
        told = later(1.0)
        told["service"]["verifiers"][0]["step_seconds"] = step
        told["service"]["drafters"][0]["round_trips"] = [
            {"verifier": "v1", "seconds": one} for one in seconds
        ]
        return service.round_trips(told)

    assert "at most 9.00 ms (d1 to v1)" in one(trips(0.001, 0.009, step=0.001)).said
    assert "none is known yet" in one(trips(step=0.01)).said
    assert one(trips(0.05, step=0.03)).ok
    found = one(trips(0.001, 0.05, step=0.02))
    assert wrong(found, "from d1 to v1 it takes 50.0 ms, and a step of the target 20.0 ms", "nearer")
    assert wrong(trips(0.05, step=0.0), "it takes 50.0 ms", "nearer")
    assert service.round_trips(later(1.0, drafters=[])) == []
    plain = later(1.0, counts={"verifiers": 1, "drafters": 0, "sessions": 0})
    assert service._workers(plain).ok and "decoding is plain" in service._workers(plain).said


def test_an_address_where_no_router_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with http_client(None, None, 5.0) as http:
        assert wrong(service.service(http, url, time.time), "no server answers", "look whether it runs")
        found = one(service.service(http, "localhost:8000", time.time))
    assert wrong(found, "localhost:8000 is no address of a router", "give a router's address in --url")
    assert ".:" not in str(found)


def test_a_processor_that_native_code_is_not_written_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.platform, "machine", lambda: processor.OURS)
    monkeypatch.setattr(native, "_processor", lambda: ["model name : old", "flags : sse4_2 avx"])
    assert not native.suits() and "with AVX2, on Linux" in processor.native_code().said

    def missing() -> list[str]:
        raise FileNotFoundError("/proc/cpuinfo")

    monkeypatch.setattr(native, "_processor", missing)
    assert not native.suits()
