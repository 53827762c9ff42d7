"""Holds what a run is told, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.errors import StartupError
from outrider.options.engine import EngineOptions
from outrider_cli.bench.cells import (
    CHAINS,
    LOCK_STEP,
    OURS,
    PATHS,
    PEERS,
    PLAIN,
    PLAIN_ALL,
    SERVER,
    Cell,
    cells,
)
from outrider_cli.bench.placing import Cores
from outrider_cli.bench.suite import suite
from outrider_cli.bench.workloads import WORKLOADS
from outrider_cli.children import Models


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run. Raises StartupError for the first value that cannot be."""

    workloads: tuple[str, ...] = ("code", "prose", "random")
    temperatures: tuple[float, ...] = (0.0, 0.8)
    streams: tuple[int, ...] = (1, 16)
    rtts_ms: tuple[float, ...] = (0.0, 20.0)
    repetitions: int = 3
    max_tokens: int = 96
    models: Models | None = None  # the pair that is served; None = a server that is there
    url: str | None = None  # of that server
    model: str | None = None  # its name for the model; None = whatever it serves
    lock_step: bool = True
    chains: bool = False  # streaming without branches, too
    paths: bool = False  # streaming without trees in a step, too
    peers: bool = True
    price_per_hour: float | None = None  # of all that serves; None = no costs are told
    engine: EngineOptions = field(default=EngineOptions())  # of each worker
    cores: Cores = Cores()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        for workload in self.workloads:
            if workload not in (*WORKLOADS, *suite()):
                raise StartupError(f"--workload {workload} is not one of {', '.join((*WORKLOADS, *suite()))}")
        if (self.url is None) == (self.models is None):
            raise StartupError(
                "--url measures a server that is there: leave out --target and --draft, or --url"
            )
        if self.url is not None and self.rtts_ms != (0.0,):
            raise StartupError(
                "--rtt is between a drafter and a verifier of this run: with --url leave it out"
            )

    @property
    def ways(self) -> tuple[str, ...]:
        """Returns the ways of serving that are measured side by side."""
        if self.models is None:
            return (SERVER,)
        only_drafts = self.models.drafts  # else guesses take no time to wait for
        left_out = {
            PLAIN_ALL: self.cores.all == self.cores.target,
            LOCK_STEP: not (self.lock_step and only_drafts),
            CHAINS: not (self.chains and only_drafts),
            PATHS: not (self.paths and only_drafts),
        }
        ours = [way for way in OURS if not left_out.get(way)]
        return (*ours, *(PEERS if self.peers else ()))

    @property
    def reference(self) -> str:
        """Returns the way of serving whose texts are right."""
        return SERVER if self.models is None else PLAIN

    def cells(self) -> list[Cell]:
        return cells(self.ways, self.workloads, self.temperatures, self.streams, self.rtts_ms)


def numbers(flag: str, text: str, read: Callable[[str], float], least: float) -> tuple[float, ...]:
    """Returns the different numbers of a list such as 1,4,16, in their order. Raises StartupError naming the
    flag."""
    try:
        found = tuple(dict.fromkeys(read(part) for part in text.split(",")))
    except ValueError:
        raise StartupError(f"{flag} must be numbers with commas between them, not {text!r}") from None
    if not all(least <= number < float("inf") for number in found):
        raise StartupError(f"{flag} must be at least {least:g}, not {text!r}")
    return found


def words(text: str) -> tuple[str, ...]:
    """Returns the different words of a list such as code,prose, in their order."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def parse_cores(text: str | None, available: Sequence[int], divided: bool = True) -> Cores:
    """Returns the cores that the text names: TARGET/DRAFT such as 0/1 or 0,1/2,3; any = wherever the system
    puts them; None = divided. Not `divided`: who drafts takes no core, so that the target has all of them, as
    `outrider serve` does it."""
    if text is None or text == "any":
        whole = Cores(tuple(available), tuple(available))
        return replace(Cores.divided(available) if divided else whole, pinned=text is None)
    try:
        target, draft = (tuple(int(core) for core in part.split(",")) for part in text.split("/"))
    except ValueError:
        raise StartupError(
            f"--cores must be TARGET/DRAFT such as 0/1 or 0,1/2,3, or any, not {text!r}"
        ) from None
    found = Cores(target, draft)
    if available and not set(found.all) <= set(available):
        there = ",".join(map(str, available))
        raise StartupError(f"--cores {text!r} names others than this process may use, which are {there}")
    return found
