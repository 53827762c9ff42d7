"""A storm: the service, its clients, and a fault every few seconds.

python -m tests.chaos.storm --seconds 600 --streams 64 [--seed N] [--out benchmarks/results/chaos]
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import json
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path

from tests.chaos.clients import Record, StormOptions
from tests.chaos.cluster import CLIENT, MEMBERS, Cluster, cluster
from tests.chaos.faults import ROGUE, Fault, Health, Kind, allowed, opening, proposals
from tests.chaos.guests import GuestOptions, Visit
from tests.chaos.references import Case, cases
from tests.chaos.report import Happened, Report, summarise, to_markdown

POLL_SECONDS = 0.1
END_SECONDS = 300.0  # for streams to begin, and for those that are open when the faults end
REFUSED_IN_A_ROW = 20  # proposals that are looked at before the storm waits a moment
MOST_WAITING = 8  # refused ones that are tried again, before new ones
OPENING_SECONDS = 240.0  # for the faults that a storm has to begin with; only a hang can reach it


@dataclass
class Storm:
    """Faults on a cluster, each mended in time. Those of `opening` come first, as soon as each is allowed."""

    cluster: Cluster
    faults: Iterator[Fault]
    opening: Sequence[Fault] = ()
    happened: list[Happened] = field(default_factory=list)
    _waiting: list[Fault] = field(default_factory=list)
    _mends: list[tuple[float, int, Fault]] = field(default_factory=list)
    _next: float = 0.0

    def blow(self, seconds: float) -> None:
        """Begins faults for so long, and until the last of the opening, and mends them all."""
        began = time.monotonic()
        self._waiting = list(self.opening)
        self._next = began + 3.0
        while time.monotonic() < began + seconds or not self._opened:
            assert time.monotonic() < began + seconds + OPENING_SECONDS, f"never allowed: {self._waiting}"
            self._mend(time.monotonic())
            health = self.cluster.health()
            if time.monotonic() >= self._next:
                fault = self._choose(health)
                if fault is not None:
                    self._begin(fault)
            time.sleep(POLL_SECONDS)
        self._mend(float("inf"))

    @property
    def _opened(self) -> bool:
        return not any(fault in self._waiting for fault in self.opening)

    def _choose(self, health: Health) -> Fault | None:
        """The first that is allowed now: of those that were not before, then of new ones."""
        for fault in self._waiting:
            if self._free(fault.target) and allowed(fault, health):
                self._waiting.remove(fault)
                return fault
        for fault in islice(self.faults, REFUSED_IN_A_ROW):
            if self._free(fault.target) and allowed(fault, health):
                return fault
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(fault)
        return None

    def _free(self, target: str) -> bool:
        return all(fault.target != target for _, _, fault in self._mends)

    def _begin(self, fault: Fault) -> None:
        at = time.monotonic()
        self.cluster.hurt(fault.kind, fault.target)
        self.happened.append(Happened(at, fault.label, fault.target, fault.seconds))
        print(f"{len(self.happened):4} {fault.label}: {fault.target}, {fault.seconds:.1f} s", flush=True)
        heapq.heappush(self._mends, (at + fault.seconds, len(self.happened), fault))
        self._next = at + fault.wait

    def _mend(self, now: float) -> None:
        while self._mends and self._mends[0][0] <= now:
            _, _, fault = heapq.heappop(self._mends)
            self.cluster.mend(fault.kind, fault.target)


def run(
    *,
    seconds: float,
    streams: int,
    seed: int,
    tokens: tuple[int, int],
    without: Collection[Kind] = (),
    targets: Collection[str] = (),
) -> Report:
    """One storm from start to end. `targets`: roles that faults hit; none = all."""
    known = cases(streams, tokens)
    with cluster() as service:
        return storm(service, known, seconds=seconds, seed=seed, without=without, targets=targets)


def storm(
    service: Cluster,
    known: list[Case],
    *,
    seconds: float,
    seed: int,
    begins_with: Sequence[tuple[str, Kind]] = (),
    without: Collection[Kind] = (),
    targets: Collection[str] = (),
) -> Report:
    """A storm over a service that is there, with a stream at a time for each case.

    `begins_with`: the roles and kinds of faults that happen in any case, and first; it lasts until they
    have, but cables are pulled only where there are some."""
    if service.no_cables is not None:
        without = {*without, Kind.CUT}
    names = {*MEMBERS, ROGUE}
    hit = {name for name in names if not targets or name.partition("-")[0] in targets}
    first = opening(seed, [(role, kind) for role, kind in begins_with if kind not in without], names)
    service.wait()
    blowing = Storm(service, proposals(seed, hit, without), first)
    with tempfile.TemporaryDirectory() as folder, guests(service, seed, Path(folder)) as visit:
        records = _with_clients(service, known, len(known), seed, Path(folder), lambda: blowing.blow(seconds))
    return summarise(
        records,
        blowing.happened,
        seed=seed,
        seconds=seconds,
        streams=len(known),
        deaths=service.deaths,
        no_cables=service.no_cables,
        visit=visit,
    )


@contextlib.contextmanager
def guests(service: Cluster, seed: int, folder: Path) -> Iterator[Visit]:
    """Guests that attack, on the clients' host; what they did is there at the end."""
    options = GuestOptions(service.urls, service.grpc_addresses, service.worker_addresses("verifier"), seed)
    options_file, result_file = folder / "guests.json", folder / "visit.json"
    options_file.write_text(json.dumps(asdict(options)))
    module = (sys.executable, "-m", "tests.chaos.guests", str(options_file), str(result_file))
    process = service.places[CLIENT].start(*module)
    visit = Visit()
    try:
        process.wait_for("guests are in", END_SECONDS)
        yield visit
        process.signal(signal.SIGTERM)
        process.wait(END_SECONDS)
        vars(visit).update(json.loads(result_file.read_text()))
    finally:
        process.kill()


def _with_clients(
    service: Cluster, known: list[Case], streams: int, seed: int, folder: Path, blow: object
) -> list[Record]:
    assert callable(blow)
    options = StormOptions(
        service.urls, service.grpc_addresses, [asdict(case) for case in known], streams, seed
    )
    options_file, result_file = folder / "options.json", folder / "result.jsonl"
    options_file.write_text(json.dumps(asdict(options)))
    module = (sys.executable, "-m", "tests.chaos.clients", str(options_file), str(result_file))
    clients = service.places[CLIENT].start(*module)
    try:
        clients.wait_for("streams flow", END_SECONDS)
        blow()
        clients.signal(signal.SIGTERM)
        clients.wait(END_SECONDS)
    finally:
        clients.kill()
    return [Record(**json.loads(line)) for line in result_file.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description="A storm of faults over a service of real processes.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--tokens", type=int, nargs=2, default=(150, 600), help="least and most of an answer")
    parser.add_argument("--targets", nargs="*", default=(), help="roles that faults hit")
    parser.add_argument("--without", nargs="*", type=Kind, default=(), help="kinds of faults to leave out")
    parser.add_argument(
        "--out", type=Path, default=None, help="file without suffix: .json and .md are written"
    )
    options = parser.parse_args()
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    print(f"the storm's seed is {seed}", flush=True)
    report = run(
        seconds=options.seconds,
        streams=options.streams,
        seed=seed,
        tokens=tuple(options.tokens),
        without=options.without,
        targets=options.targets,
    )
    text = to_markdown(report)
    print(text)
    if options.out is not None:
        options.out.with_suffix(".json").write_text(json.dumps(asdict(report), indent=1) + "\n")
        options.out.with_suffix(".md").write_text(text)
    return 0 if report.sound else 1


if __name__ == "__main__":
    sys.exit(main())
