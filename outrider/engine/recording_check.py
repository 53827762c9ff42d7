"""Shows at load that recorded steps give what is given call by call."""

from __future__ import annotations

import logging
from dataclasses import replace

from outrider.engine.engine import Engine
from outrider.engine.runner import Runner
from outrider.engine.self_check import CHUNKS, Reference, run
from outrider.engine.short_windows import short_windows

log = logging.getLogger(__name__)


def check_recorded(engine: Engine, calls: Runner, expected: Reference) -> None:
    """Lets the engine go back to `calls`, in all processes of its group, if its recorded steps give other
    logits than rounding explains."""
    with short_windows(engine.model):
        (found,) = run(engine, [CHUNKS])
        recorded, engine.runner = engine.runner, calls
        (wanted,) = run(engine, [CHUNKS])
    apart = replace(expected, logits=wanted).apart(found)
    right = apart <= expected.tolerance
    if not right:
        log.warning("steps run call by call, which is slower: recorded ones are %.1f%% away", 100 * apart)
    if engine.group.agree(right):
        engine.runner = recorded
