"""The service of a storm: every process on a host of its own, and what a fault does to one of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.chaos.faults import ROGUE, Health, Kind, role_of
from tests.cluster.hosts import switched
from tests.cluster.namespace import missing
from tests.cluster.process import ROOT, Process
from tests.redis_server import PASSWORD, QUOTED_PASSWORD, executable

TARGET = ROOT / "demo" / "models" / "target"
DRAFT = ROOT / "demo" / "models" / "draft"
MEMBERS = (
    "redis",
    *("router-1", "router-2", "verifier-1", "verifier-2", "drafter-1", "drafter-2", "drafter-3"),
    ROGUE,
)
LOOKS_UP = "drafter-3"
CLIENT = "client"
HTTP_PORT, GRPC_PORT, WORKER_PORT, REDIS_PORT = 8000, 50051, 50061, 6379
READY_SECONDS = 240.0


class Place(Protocol):
    """Where a process runs: a host of its own, or an address of loopback."""

    @property
    def address(self) -> str: ...
    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> Process: ...
    def cut(self) -> None: ...
    def join(self) -> None: ...


@dataclass(frozen=True)
class Loopback:
    """Where no namespaces can be made: no cable can be pulled."""

    address: str

    def start(self, *command: str, environment: Mapping[str, str] | None = None) -> Process:
        return Process(command, environment or {})

    def cut(self) -> None:
        raise NotImplementedError("a process on loopback has no cable")

    join = cut


@contextlib.contextmanager
def places(*names: str) -> Iterator[tuple[Mapping[str, Place], str | None]]:
    """A place for each name; and why no cable can be pulled, where that is so."""
    why = missing()
    if why is None:
        with switched(*names) as hosts:
            yield hosts, None
    else:
        net = f"127.{20 + os.getpid() % 200}.{os.getpid() // 200 % 250}"
        yield {name: Loopback(f"{net}.{number}") for number, name in enumerate(names, start=10)}, why


@dataclass
class Member:
    """One process of the service, by name."""

    name: str
    place: Place
    command: tuple[str, ...]
    ready: str  # what it says when it serves
    process: Process | None = None
    hurt: bool = False  # frozen or cut off
    well_since: float | None = None  # None = not yet, or not now

    def start(self) -> None:
        self.well_since = None
        self.process = self.place.start(*self.command)

    def kill(self) -> None:
        self.well_since = None
        if self.process is not None:
            self.process.kill()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.signal(number)

    def look(self, now: float) -> None:
        """Notes since when it runs undisturbed."""
        if self.hurt or self.process is None or not self.process.running:
            self.well_since = None
        elif self.well_since is None and any(self.ready in line for line in list(self.process.said)):
            self.well_since = now


@dataclass
class Cluster:
    """2 routers, 2 verifiers, 3 drafters, of which the last has no model, and a Redis."""

    places: Mapping[str, Place]
    folder: Path  # what Redis keeps
    kv_memory: str
    no_cables: str | None  # why no cable can be pulled
    members: dict[str, Member] = field(default_factory=dict)
    emptied: float = -1e9  # when Redis last lost its memory
    deaths: list[str] = field(default_factory=list)  # processes that ended without a fault

    def __post_init__(self) -> None:
        self._add("redis", self._redis(), "eady to accept connections")
        open_to_all = ("--insecure",) if self.no_cables is None else ()  # all hosts are this machine's own
        for name, place in self.places.items():
            role = role_of(name)
            here = ("--host", place.address, *open_to_all)
            python = (sys.executable, "-m", "outrider_cli", role, *here, "--store", self.store)
            worker = ("--port", str(WORKER_PORT), "--threads", "1", "--kv-memory", self.kv_memory)
            guesses = ("--propose", "suffix") if name == LOOKS_UP else ("--draft", str(DRAFT))
            options = {
                "router": ("--port", str(HTTP_PORT), "--grpc-port", str(GRPC_PORT)),
                "verifier": ("--target", str(TARGET), "--name", "outrider-demo", *worker),
                "drafter": (*guesses, *worker),
            }.get(role)
            if options is not None:
                self._add(name, (*python, *options), f"outrider {role} ready: ")

    def _add(self, name: str, command: tuple[str, ...], ready: str) -> None:
        self.members[name] = Member(name, self.places[name], command, ready)

    @property
    def store(self) -> str:
        return f"redis://:{QUOTED_PASSWORD}@{self.places['redis'].address}:{REDIS_PORT}/0"

    def _redis(self) -> tuple[str, ...]:
        options = {
            "port": str(REDIS_PORT),
            "bind": self.places["redis"].address,
            "requirepass": PASSWORD,
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always",
        }
        return (executable(), *(word for name, value in options.items() for word in (f"--{name}", value)))

    @property
    def urls(self) -> list[str]:
        return [f"http://{place.address}:{HTTP_PORT}" for place in self._of("router")]

    @property
    def grpc_addresses(self) -> list[str]:
        return [f"{place.address}:{GRPC_PORT}" for place in self._of("router")]

    def worker_addresses(self, role: str) -> list[str]:
        return [f"{place.address}:{WORKER_PORT}" for place in self._of(role)]

    def _of(self, role: str) -> list[Place]:
        return [place for name, place in self.places.items() if role_of(name) == role]

    def start(self) -> None:
        """Returns when all are ready. The first verifier goes ahead: the others find what it has measured."""
        for names in (("redis",), ("router-1", "router-2", "verifier-1"), tuple(self.members)):
            for name in names:
                if self.members[name].process is None:
                    self.members[name].start()
            self.wait(names)

    def wait(self, names: Iterable[str] = ()) -> None:
        """Returns when those, or all, are ready."""
        for member in [self.members[name] for name in names or self.members]:
            assert member.process is not None
            member.process.wait_for(member.ready, READY_SECONDS)

    def health(self) -> Health:
        """Returns the health of now. Restarts what has ended without a fault of ours, and notes it."""
        now = time.monotonic()
        well = {}
        for member in self.members.values():
            if member.process is not None and not member.process.running:
                self.deaths.append(f"{member.name} ended by itself:\n{member.process}")
                member.start()
            member.look(now)
            if member.well_since is not None:
                well[member.name] = now - member.well_since
        return Health({**well, ROGUE: 1e9}, now - self.emptied)

    def hurt(self, kind: Kind, name: str) -> None:
        if kind is Kind.GARBAGE:
            self._rogue()
            return
        member = self.members[name]
        match kind:
            case Kind.KILL | Kind.RESTART | Kind.EMPTY:
                member.kill()
            case Kind.FREEZE:
                member.hurt = True
                member.signal(signal.SIGSTOP)
            case Kind.CUT:
                member.hurt = True
                member.place.cut()
        if kind is Kind.EMPTY:
            shutil.rmtree(self.folder)
            self.folder.mkdir()

    def mend(self, kind: Kind, name: str) -> None:
        if kind is Kind.GARBAGE:
            self.members.pop(ROGUE).kill()
            return
        member = self.members[name]
        match kind:
            case Kind.KILL | Kind.RESTART | Kind.EMPTY:
                member.start()
            case Kind.FREEZE:
                member.hurt = False
                member.signal(signal.SIGCONT)
            case Kind.CUT:
                member.hurt = False
                member.place.join()
        if kind is Kind.EMPTY:
            self.emptied = time.monotonic()

    def _rogue(self) -> None:
        """A drafter that lies begins: its own record in the store, another drafter's name in what it says."""
        place = self.places[ROGUE]
        command = (
            *(sys.executable, "-m", "tests.chaos.garbage", self.store, f"{place.address}:{WORKER_PORT}"),
            *self.worker_addresses("drafter"),
        )
        self.members[ROGUE] = Member(ROGUE, place, command, "rogue drafter ready")
        self.members[ROGUE].start()

    def stop(self) -> None:
        for member in self.members.values():
            member.kill()


@contextlib.contextmanager
def cluster(kv_memory: str = "256MiB") -> Iterator[Cluster]:
    """The service, ready; whatever happens, nothing of it is left at the end."""
    with places(*MEMBERS, CLIENT) as (made, why), tempfile.TemporaryDirectory() as folder:
        found = Cluster(made, Path(folder) / "redis", kv_memory, why)
        found.folder.mkdir()
        try:
            found.start()
            yield found
        finally:
            found.stop()
