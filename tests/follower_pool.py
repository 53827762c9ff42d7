"""Real follower processes that serve one group after another, so that a test does not pay for their start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from outrider.engine import assembly
from outrider.engine.engine import Engine
from outrider.engine.fusing import fused
from outrider.engine.loading import load_engine
from outrider.engine.parts import Parts
from outrider.engine.ranks import Followers, Ranks
from outrider.errors import OutriderError, PeerLost
from outrider.options.engine import EngineOptions
from outrider.worker.followers import FollowerSpec, StartFollowers, follow
from tests.forked import PATIENCE_SECONDS, Forked, parent

KV_BYTES = 2**24
OPTIONS = EngineOptions(kv_memory=str(KV_BYTES), threads=1)


class Pool:
    """Processes that each run one follower after another; `last` is what each said at its last end."""

    def __init__(self) -> None:
        self.last: list[str] = []
        self._idle: list[Forked] = []

    def start(self, specs: Sequence[FollowerSpec]) -> Followers:
        while len(self._idle) < len(specs):
            module = ("tests.follower_pool",)
            self._idle.append(parent().fork(module, {**os.environ, "OMP_NUM_THREADS": "1"}))
        taken, self._idle = self._idle[: len(specs)], self._idle[len(specs) :]
        for process, spec in zip(taken, specs, strict=True):
            print(spec.to_json(), file=process.stdin, flush=True)
        return _Taken(self, taken)

    def give_back(self, processes: list[Forked]) -> None:
        self.last = []
        for process in processes:
            self.last.append(process.stdout.readline().strip())
        self._idle += processes

    def close(self) -> None:
        for process in self._idle:
            process.stdin.close()
            process.wait(PATIENCE_SECONDS)


class _Taken:
    """The followers of one group."""

    def __init__(self, pool: Pool, processes: list[Forked]) -> None:
        self._pool = pool
        self._processes = processes

    def check(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise PeerLost("a pooled follower ended")

    def stop(self) -> None:
        processes, self._processes = self._processes, []
        self._pool.give_back(processes)


@contextmanager
def divided(
    folder: Path, size: int, start: StartFollowers, parts: Parts | None = None, **changed: str
) -> Iterator[Engine]:
    """A leader's engine on a tiny model; the followers' specs may differ in what is `changed`."""
    ranks = Ranks.host(size)
    specs = [
        FollowerSpec(replace(ranks.group, rank=rank), str(folder), OPTIONS, parts) for rank in range(1, size)
    ]
    specs = [replace(spec, options=replace(spec.options, **changed)) for spec in specs]
    ranks.followers = start(specs)
    try:
        engine = load_engine(str(folder), kv_memory_bytes=KV_BYTES, threads=1, ranks=ranks, parts=parts)
    except BaseException:
        ranks.close()
        raise
    try:
        yield engine
    finally:
        engine.close()


def compile_without_code() -> None:
    """From now on layers are traced by torch's compiler, and run as they were traced: making code of it takes
    a minute."""
    setattr(assembly, "fused", partial(fused, backend="eager"))  # noqa: B010


def main() -> None:
    """Follows whoever is named, and says how that ended."""
    compile_without_code()
    for line in sys.stdin:
        try:
            follow(FollowerSpec.from_json(line))
        except OutriderError as error:
            print(error.message, flush=True)
        else:
            print("stopped", flush=True)


if __name__ == "__main__":
    main()
