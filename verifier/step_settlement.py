"""Settles a step: commits what it chose, and gives back the slots of rejected drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.engine.kv_blocks import BlockPool
from outrider.sampling.logprobs import Scores
from verifier.governor import StepSeen
from verifier.meter import Meter
from verifier.part import Part
from verifier.running import Running
from verifier.session import Outcome


def settle(
    parts: Sequence[Part],
    chosen: list[int],
    sessions: Mapping[bytes, Running],
    pool: BlockPool,
    now: float,
    scores: Scores | None = None,
) -> list[tuple[Running, Outcome]]:
    """Returns what the step fixed for each session that a token was drawn for.

    `chosen`: the tokens of the parts' rows, one part after the other; `scores`: of those that asked. A
    session that is no longer among `sessions` was closed while the step ran, and one whose grammar cannot be
    followed, are left out. The others have a lesson to learn."""
    outcomes = []
    offset = 0
    of_prompts = iter(scores.of_prompts if scores is not None else ())
    for part in parts:
        first, offset = offset, offset + part.drawn
        picked = chosen[first:offset]
        running = part.running
        prompt = next(of_prompts) if part.scored else None
        if sessions.get(running.id) is not running or running.lost:
            continue
        if prompt is not None and running.prompt is not None:
            running.prompt.extend(prompt)
        if part.final:
            outcome = running.commit(part.nodes, picked, now)
            if scores is not None and running.session.spec.params.logprobs is not None:
                rows = [0, *(1 + node for node in outcome.followed)][: len(outcome.tokens)]
                found = tuple(scores.found[first + row] for row in rows)
                running.logprobs.extend(found)
                outcome = outcome._replace(logprobs=found)
            if running.session.spec.params.guesses:
                running.told.append(outcome)
            outcomes.append((running, outcome))
            kept = min(outcome.accepted, len(outcome.tokens) - 1)
            lying, running.moves = part.moves(outcome.followed[:kept], pool.block_size)
            pool.truncate(running.table, outcome.base + kept)
            if running.moves:  # nobody shares them before they are where they belong
                pool.seal(running.table, running.session.log[: outcome.base + lying])
                continue
        pool.seal(running.table, running.session.log)
    return outcomes


def measure(
    meter: Meter, parts: Sequence[Part], committed: int, seconds: float, waited: float
) -> tuple[int, StepSeen | None]:
    """Lets the meter learn from a step of these parts that committed so many tokens. Returns the step's
    tokens, and what there is to compare of it; None if a prompt was read. `waited` seconds passed before it,
    in which the engine was free."""
    tokens = decoding = wanting = starved = behind = 0
    for part in parts:
        drafts = part.drafts
        tokens += part.tokens + drafts
        decoding += 1 + drafts if part.tokens == 1 else 0
        session = part.running.session
        if session.num_speculative_tokens > 0 and not session.resting:
            wanting += 1
            starved += not drafts
            behind += not (drafts or any(seat.caught_up for seat in part.running.seats))
    if decoding < tokens:
        meter.observe_reading(seconds, decoding, tokens - decoding)
        return tokens, None
    starvation = starved / wanting if wanting else None
    meter.observe(seconds, tokens, committed, starvation, waited, drafts=tokens - len(parts))
    return tokens, StepSeen(seconds + waited, committed, len(parts), behind / wanting if wanting else None)
