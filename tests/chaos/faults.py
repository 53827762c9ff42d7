"""What goes wrong in a storm: drawn from a seed, and refused where it would take away all of a role. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    KILL = "killed"  # SIGKILL, and started again
    FREEZE = "frozen"  # SIGSTOP, then SIGCONT
    CUT = "cut off"  # its host's cable pulled, and put back
    RESTART = "restarted"  # Redis: killed, and started with what it has on disk
    EMPTY = "restarted empty"  # Redis: killed, and started without memory
    GARBAGE = "garbage"  # a drafter that lies, under another one's name


# How long a fault lasts until it is mended, in seconds. What was killed then takes its time to start.
SECONDS: Mapping[Kind, tuple[float, float]] = {
    Kind.KILL: (0.5, 3.0),
    Kind.FREEZE: (10.0, 10.0),
    Kind.CUT: (3.0, 10.0),
    Kind.RESTART: (0.5, 3.0),
    Kind.EMPTY: (0.5, 3.0),
    Kind.GARBAGE: (8.0, 12.0),
}
GAP_SECONDS = (3.0, 5.0)  # between faults
SETTLED_SECONDS = 5.0  # after a router or verifier is back, until another of its role may fail
LOG_SECONDS = 10.0  # after Redis has lost its memory, until routers have written their logs again
ROGUE = "rogue"

PROCESS_KINDS = (Kind.KILL, Kind.FREEZE, Kind.CUT)
OF_ROLE: Mapping[str, tuple[Kind, ...]] = {
    "router": PROCESS_KINDS,
    "verifier": PROCESS_KINDS,
    "drafter": PROCESS_KINDS,
    "redis": (Kind.RESTART, Kind.EMPTY),
    ROGUE: (Kind.GARBAGE,),
}
WEIGHTS: Mapping[str, int] = {"router": 3, "verifier": 4, "drafter": 2, "redis": 1, ROGUE: 1}


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    target: str  # the name of a process
    seconds: float  # until it is mended
    wait: float  # seconds after the fault before it

    @property
    def label(self) -> str:
        """The kind of fault as the report counts it."""
        return f"{role_of(self.target)} {self.kind.value}"


@dataclass(frozen=True, slots=True)
class Health:
    """The service at a moment."""

    well: Mapping[str, float]  # processes that run undisturbed: since so many seconds
    since_empty: float = 1e9  # seconds since Redis last lost its memory


def role_of(name: str) -> str:
    """`verifier` of `verifier-2`."""
    return name.partition("-")[0]


def proposals(seed: int, names: Collection[str], without: Collection[Kind] = ()) -> Iterator[Fault]:
    """Faults without end, the same for the same arguments; the kinds of a role come equally often.

    `names`: of all processes."""
    rng = random.Random(seed)
    bags: dict[str, list[Kind]] = {}
    roles = {
        role: (members, kinds)
        for role in OF_ROLE
        if (members := sorted(name for name in names if role_of(name) == role))
        and (kinds := [kind for kind in OF_ROLE[role] if kind not in without])
    }
    while True:
        role = rng.choices(list(roles), [WEIGHTS[role] for role in roles])[0]
        members, kinds = roles[role]
        bag = bags.setdefault(role, [])
        if not bag:
            bag += rng.sample(kinds, len(kinds))
        yield _drawn(rng, bag.pop(), members)


def opening(seed: int, kinds: Sequence[tuple[str, Kind]], names: Collection[str]) -> list[Fault]:
    """Returns a fault for each (role, kind), in that order: those with which a short storm begins."""
    rng = random.Random(seed)
    return [
        _drawn(rng, kind, sorted(name for name in names if role_of(name) == role)) for role, kind in kinds
    ]


def _drawn(rng: random.Random, kind: Kind, members: Sequence[str]) -> Fault:
    return Fault(kind, rng.choice(members), rng.uniform(*SECONDS[kind]), rng.uniform(*GAP_SECONDS))


def allowed(fault: Fault, health: Health) -> bool:
    """Returns True if the service promises to survive the fault now: a router and a verifier stay, and no
    router is lost together with the only copy of its log."""
    if fault.target not in health.well:
        return False
    role = role_of(fault.target)
    if role in ("router", "verifier"):
        others = [name for name in health.well if role_of(name) == role and name != fault.target]
        if not any(health.well[name] >= SETTLED_SECONDS for name in others):
            return False
    redis_well = any(role_of(name) == "redis" for name in health.well)
    if role == "router":
        return redis_well and health.since_empty >= LOG_SECONDS
    if fault.kind is Kind.EMPTY:
        routers = [since for name, since in health.well.items() if role_of(name) == "router"]
        return len(routers) == 2 and min(routers) >= SETTLED_SECONDS
    return True
