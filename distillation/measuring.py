"""How often a draft guesses what its target says, on texts that the target has written."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
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

    A step that starts at a position yields the run of matches there, at most k, and one token of the
    target's own (the correction, or the bonus after a full run). Exact for greedy decoding, because
    everything the draft has read when it proposes is text that the target has accepted. A step that
    the end of the text cuts short is not counted.
    """
    steps = tokens = 0
    for row in matches:
        position = 0
        while position < len(row):
            run = 0
            while run < k and position + run < len(row) and row[position + run]:
                run += 1
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


def acceptance(draft: Any, texts: Iterable[Text], vocabulary: torch.Tensor) -> dict[str, Any]:
    """Returns shares of accepted tokens and tokens a step, by temperature; shares by category, if there are
    any."""
    draft.eval()
    found = [(text, matches(draft, text, vocabulary)) for text in texts if text.written]
    by_temperature: defaultdict[float, list[list[bool]]] = defaultdict(list)
    by_category: defaultdict[str, list[list[bool]]] = defaultdict(list)
    for text, row in found:
        by_temperature[text.temperature].append(row)
        if text.category:
            by_category[text.category].append(row)
    return {
        "by_temperature": {
            f"{temperature:g}": {
                "acceptance": _share(rows),
                "tokens": sum(map(len, rows)),
                "tokens_per_step": {str(k): round(tokens_per_step(rows, k), 3) for k in KS},
            }
            for temperature, rows in sorted(by_temperature.items())
        },
        "by_category": {name: _share(rows) for name, rows in sorted(by_category.items())},
    }


def step_ms(engine: Engine) -> float:
    """Returns the time of a step of one token, in milliseconds: the median of some."""
    seconds = []
    for _ in range(TIMED_STEPS):
        began = time.perf_counter()
        engine.probe()
        seconds.append(time.perf_counter() - began)
    return round(1000 * statistics.median(seconds), 3)


def _share(rows: Sequence[Sequence[bool]]) -> float:
    return round(sum(map(sum, rows)) / max(1, sum(map(len, rows))), 4)
