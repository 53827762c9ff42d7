"""Times the engine's steps at start, on the numbers of tokens that will run, and remembers the result."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
from collections.abc import Callable, Mapping
from hashlib import blake2b
from pathlib import Path

import torch

from outrider import __version__
from outrider.engine.engine import Engine, Work
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row
from verifier.price import StepTime

log = logging.getLogger(__name__)

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
REPEATS = 3  # at least, and for so many seconds; the fastest counts: what disturbs a step makes it slower
SECONDS = 0.1
LONG_ENOUGH = 0.5  # seconds: if a step takes that, larger ones lie on the line

Clock = Callable[[], float]
Progress = Callable[[float], None]


def profile(engine: Engine, clock: Clock, progress: Progress, most_tokens: int = TOKENS[-1]) -> StepTime:
    """Times decode steps of short sessions, of up to `most_tokens` tokens; what longer sessions add, StepTime
    learns as it is used.

    `clock` gives seconds; `progress` hears the share that is done, 0 to 1. Leaves the KV pool as it is."""
    row = Row(SamplingParams(temperature=0.0), 1, None, ())
    sizes = [tokens for tokens in TOKENS if tokens <= max(most_tokens, 1)]
    seconds: dict[int, float] = {}
    for index, tokens in enumerate(sizes):
        progress(index / len(sizes))
        works = [Work([engine.attention.pools.scratch_block], 0, [0], 1)] * tokens
        took: list[float] = []
        while len(took) < REPEATS or sum(took) < SECONDS:
            began = clock()
            engine.choose(engine.prepare(works), [row] * tokens)
            took.append(clock() - began)
        seconds[tokens] = min(took)
        if seconds[tokens] > LONG_ENOUGH:
            break
    progress(1.0)
    return StepTime.measured(seconds)


def remembered(folder: Path | None, what: Mapping[str, object], measure: Callable[[], StepTime]) -> StepTime:
    """Returns what `measure` found when it last ran for `what`, the model and the machine; else it runs now.

    One small JSON file each in `folder`; None = nothing is remembered. A file that is damaged, or not about
    `what`, counts as none."""
    if folder is None:
        return measure()
    about = {**what, "host": platform.node(), "outrider": __version__, "torch": torch.__version__}
    name = blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=12).hexdigest()
    path = folder / f"step-time-{name}.json"
    found = _read(path, about)
    if found is None:
        found = measure()
        _write(path, about, found)
    return found


def _read(path: Path, about: Mapping[str, object]) -> StepTime | None:
    try:
        if not path.is_file():  # a pipe would never end
            return None
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["about"] != about:
            return None
        seconds = {int(tokens): float(time) for tokens, time in kept["seconds"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        return None
    sound = all(tokens >= 1 and math.isfinite(time) and time > 0 for tokens, time in seconds.items())
    return StepTime.measured(seconds) if seconds and sound else None


def _write(path: Path, about: Mapping[str, object], step_time: StepTime) -> None:
    points = zip(step_time.tokens.tolist(), step_time.profile.tolist(), strict=True)
    kept = {"about": about, "seconds": {str(int(tokens)): seconds for tokens, seconds in points}}
    unfinished = path.with_suffix(f".{os.getpid()}")  # of two workers that start together, each has its own
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        log.warning("the step times could not be kept in %s: %s", path.parent, error)
