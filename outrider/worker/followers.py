"""The processes that hold the other parts of a leader's model: how they are started, watched and ended.

Here they are processes of the leader's machine. deploy/ starts them elsewhere: it gives `model.load` a
function of its own, and has each of its processes call `follow`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider.engine.loading import load_engine
from outrider.engine.parts import Parts
from outrider.engine.rank_group import follow as follow_leader
from outrider.engine.ranks import LAST_WORDS_SECONDS, POLL_SECONDS, Followers, Place, Ranks
from outrider.errors import PeerLost, StartupError
from outrider.options.engine import EngineOptions
from outrider.options.telemetry import Logging
from outrider.worker.garbage import spare_what_is_there

__all__ = ["FollowerProcesses", "FollowerSpec", "Followers", "StartFollowers", "follow"]

AFTER_ANOTHER = 3  # exit code of a follower that ends as the group broke


@dataclass(frozen=True, slots=True)
class FollowerSpec:
    """What a follower is told, as plain data."""

    group: Place
    model: str  # folder or hub id, as on the leader
    options: EngineOptions  # as the leader's, with a device of its own
    parts: Parts | None = None  # of its engine, as the leader's; None = what is usual on the device
    logging: Logging = field(default=Logging())  # as the leader's

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FollowerSpec:
        values = json.loads(text)
        values["group"] = Place(**values["group"])
        values["options"] = EngineOptions(**values["options"])
        values["logging"] = Logging(**values["logging"])
        if (parts := values["parts"]) is not None:
            values["parts"] = Parts(**{**parts, "attention": tuple(parts["attention"])})
        return cls(**values)


StartFollowers = Callable[[Sequence[FollowerSpec]], Followers]


def follow(spec: FollowerSpec) -> None:
    """Runs a follower until its leader stops it. Raises PeerLost if the leader goes in another way, and
    StartupError, of which the leader is told, if it cannot load its part."""
    ranks = Ranks.join(spec.group)
    try:
        engine = load_engine(
            spec.model,
            device=spec.options.device,
            dtype=spec.options.number_format,
            kv_memory_bytes=spec.options.memory_for_kv,
            threads=spec.options.threads,
            ranks=ranks,
            parts=spec.parts,
        )
        spare_what_is_there()
        follow_leader(engine, ranks)
    except StartupError as error:
        ranks.refuse(error.message)
        raise
    finally:
        ranks.close()


def device_of(device: str, rank: int) -> str:
    """Returns the device of a rank whose leader has `device`: the GPUs after the leader's."""
    if device == "cpu":
        return device
    first = int(device.partition(":")[2] or 0)
    return f"cuda:{first + rank}"


class FollowerProcesses:
    """The followers as children of this process. They end with it, however it ends."""

    def __init__(self, specs: Sequence[FollowerSpec]) -> None:
        """Starts them. Must be called on a thread that lasts: Linux ends a child with the thread that started
        it."""
        self._processes = {spec.group.rank: _start(spec) for spec in specs}

    @property
    def pids(self) -> dict[int, int]:
        """Returns the process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def check(self) -> None:
        until = time.monotonic() + LAST_WORDS_SECONDS
        while ended := self._ended():
            causes = {rank: code for rank, code in ended.items() if code != AFTER_ANOTHER}
            if causes or time.monotonic() > until:
                rank, code = next(iter((causes or ended).items()))
                raise PeerLost(f"follower {rank} of the tensor-parallel group {_how_it_ended(code)}")
            time.sleep(POLL_SECONDS)  # the end of the one that they followed is told a moment later

    def _ended(self) -> dict[int, int]:
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: code for rank, code in codes.items() if code is not None}

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()  # it holds nothing that would have to be saved; one that has ended is left alone
        for process in self._processes.values():
            process.wait()


def _start(spec: FollowerSpec) -> subprocess.Popen[Any]:
    command = [sys.executable, "-m", "outrider.worker.follower", str(os.getpid()), spec.to_json()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    if code == AFTER_ANOTHER:
        return "ended as another process of it had ended or did not answer"
    return f"ended with exit code {code}"
