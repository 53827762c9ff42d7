"""What a run measures: every combination of the settings, each by every way of serving. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product

PLAIN = "plain"
PLAIN_ALL = "plain, all cores"  # those of the drafter, too
LOCK_STEP = "lock-step"
STREAMING = "streaming"
CHAINS = "streaming, chains"  # without branches
PATHS = "streaming, paths"  # with them, and one path of them in a step
TRANSFORMERS = "transformers"  # its generate: plain, with the draft model, and that with its best setting
ASSISTED = "assisted"
TUNED = "assisted, tuned"
SERVER = "server"  # one that was there before
ALL_KINDS = "all kinds"  # the workloads together
OURS = (PLAIN, PLAIN_ALL, LOCK_STEP, CHAINS, PATHS, STREAMING)
PEERS = (TRANSFORMERS, ASSISTED, TUNED)


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What is asked, and over what line."""

    workload: str
    temperature: float
    streams: int  # requests at the same time
    rtt_ms: float  # round trip between drafter and verifier

    def __str__(self) -> str:
        streams = f"{self.streams} stream{'s' * (self.streams > 1)}"
        return f"{self.workload}, temperature {self.temperature:g}, {streams}, {self.rtt_ms:g} ms"


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """A group of requests, sent at the same time to one way of serving."""

    way: str
    setting: Setting

    def as_json(self) -> dict[str, object]:
        return {"way": self.way, **asdict(self.setting)}


def cells(
    ways: Sequence[str],
    workloads: Sequence[str],
    temperatures: Sequence[float],
    streams: Sequence[int],
    rtts_ms: Sequence[float],
) -> list[Cell]:
    """Returns every combination. Plain decoding is measured at each round trip too: so what it is compared
    with ran at the same time. transformers takes one stream; it has no line, nor has a target with all
    cores."""
    combinations = [Setting(*one) for one in product(workloads, temperatures, streams, rtts_ms)]
    return [
        Cell(way, setting)
        for setting in combinations
        for way in ways
        if (way not in PEERS or setting.streams == 1)
        and (way not in (*PEERS, PLAIN_ALL) or setting.rtt_ms == min(rtts_ms))
    ]


def in_order(planned: Sequence[Cell], rng: random.Random) -> list[tuple[float, list[Cell]]]:
    """Returns a repetition: (round trip, its cells), both in random order; the line changes only between
    them."""
    by_line = sorted(planned, key=lambda cell: cell.setting.rtt_ms)
    parts = [(rtt, list(part)) for rtt, part in groupby(by_line, key=lambda cell: cell.setting.rtt_ms)]
    for _, part in parts:
        rng.shuffle(part)
    rng.shuffle(parts)
    return parts


def asked(streams: int, repetition: int, prompts: int) -> list[int]:
    """Returns which of so many prompts a repetition's group takes: the next `streams`, round and round."""
    return [(repetition * streams + number) % prompts for number in range(streams)]


def prompts_needed(streams: Sequence[int], repetitions: int) -> int:
    """Returns the number of prompts of a workload: as many as the largest group, and a different one for each
    single stream."""
    return max([*streams, repetitions])
