"""How often a draft or a speculator guesses what its target says, on texts that the target has written."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from distillation.texts import Text
from outrider.engine.engine import Engine
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, rank

KS = (1, 3, 5, 8)
TIMED_STEPS = 20


def tokens_per_step(matches: Sequence[Sequence[bool]], k: int) -> float:
    """Returns the mean tokens a verification step yields with k drafted ones, from each text's matches.

    Exact for greedy decoding, because everything the draft has read when it proposes is text that the target
    has accepted."""
    return tokens_of_runs([runs(row) for row in matches], k)


def runs(matches: Sequence[bool]) -> list[int]:
    """Returns how many tokens from each place on are guessed in a row."""
    found, run = [], 0
    for match in reversed(matches):
        run = run + 1 if match else 0
        found.append(run)
    return found[::-1]


def tokens_of_runs(texts: Sequence[Sequence[int]], k: int) -> float:
    """Returns the mean tokens of a verification step with k guessed ones, from how many of the guesses at
    each place of each text are right before one is wrong.

    A step that starts at a position yields these, at most k, and one token of the target's own (the
    correction, or the bonus after a full run). A step that the end of the text cuts short is not counted.
    """
    steps = tokens = 0
    for row in texts:
        position = 0
        while position < len(row):
            run = min(k, row[position])
            if position + run >= len(row):
                break
            steps += 1
            tokens += run + 1
            position += run + 1
    return tokens / steps if steps else 0.0


@torch.no_grad()
def matches(draft: Any, text: Text, vocabulary: torch.Tensor) -> list[bool]:
    """Returns, for each token the target wrote, True if the draft guesses it, as a drafter does: with the
    noise by which the target drew it. The draft's logits are of the `vocabulary` [K]."""
    ids = torch.tensor([text.ids[:-1]], device=vocabulary.device)
    logits = draft(input_ids=ids, use_cache=False).logits[0, text.prompt - 1 :].cpu()
    params = SamplingParams(temperature=text.temperature, seed=text.seed)
    positions = range(text.prompt, len(text.ids))
    rows = [Row(params, position, None, ()) for position in positions]
    guesses = rank(logits.float(), rows, 1, None, vocabulary.cpu())
    return [guess.ids[0] == text.ids[at] for guess, at in zip(guesses, positions, strict=True)]


def acceptance(found: Iterable[tuple[Text, Sequence[int]]], ks: Sequence[int] = KS) -> dict[str, Any]:
    """Returns shares of accepted tokens and tokens a step, by temperature; shares by category, if there are
    any; of each text how many of the guesses at each place are right before one is wrong."""
    by_temperature: defaultdict[float, list[Sequence[int]]] = defaultdict(list)
    by_category: defaultdict[str, list[Sequence[int]]] = defaultdict(list)
    for text, row in found:
        by_temperature[text.temperature].append(row)
        if text.category:
            by_category[text.category].append(row)
    return {
        "by_temperature": {
            f"{temperature:g}": {
                "acceptance": _share(rows),
                "tokens": sum(map(len, rows)),
                "tokens_per_step": {str(k): round(tokens_of_runs(rows, k), 3) for k in ks},
            }
            for temperature, rows in sorted(by_temperature.items())
        },
        "by_category": {name: _share(rows) for name, rows in sorted(by_category.items())},
    }


def step_ms(engine: Engine) -> float:
    """Returns the time of a step of one token, in milliseconds: the median of some."""
    return median_ms(engine.probe)


def median_ms(call: Callable[[], object]) -> float:
    """Returns the time of a call, in milliseconds: the median of some."""
    seconds = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return round(1000 * statistics.median(seconds), 3)


def _share(rows: Sequence[Sequence[int]]) -> float:
    right = sum(run > 0 for row in rows for run in row)
    return round(right / max(1, sum(map(len, rows))), 4)
