"""Log-probabilities of the model itself, for the rows that ask for them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.sampling.likeliest import likeliest, log_normalizer
from outrider.sampling.shaping import Row
from outrider.wire.logprobs import Logprob, PromptLogprobs


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of logits that a prompt's own tokens follow."""

    first: int  # of the step's rows
    tokens: Sequence[int]  # that follow each of the rows
    count: int  # of likeliest tokens that are told


class Scores:
    """What a step is to tell besides tokens, and what it told."""

    def __init__(
        self,
        counts: Sequence[int | None],
        prompts: Sequence[PromptRows] = (),
        drawn: Sequence[int] | None = None,
    ) -> None:
        """`counts`, by row: of how many likeliest tokens it is told; None = of none, nor of the drawn one.
        `drawn`: which of the step's rows those are; None = all, as there are no `prompts`."""
        self.counts = counts
        self.prompts = prompts
        self.drawn = drawn
        self.of_prompts: list[PromptLogprobs] = []  # of each of `prompts`
        self.found: dict[
            int, Logprob
        ] = {}  # by row: of those that count, as all drafts before them were drawn

    def read(self, logits: torch.Tensor) -> torch.Tensor:
        """Finds what prompts are to be told. `logits` [all rows of the step, V]; returns those drawn from."""
        self.of_prompts = [_of_prompt(logits, rows) for rows in self.prompts]
        return logits if self.drawn is None else logits[list(self.drawn)]

    def find(self, logits: torch.Tensor, rows: Sequence[Row], chosen: Sequence[int]) -> None:
        """`logits` [R, V], as the model gave them. Each row is reckoned alone: in any company its numbers are
        the same."""
        counts = False
        for index, (row, count) in enumerate(zip(rows, self.counts, strict=True)):
            counts = row.after is None or (counts and chosen[index - 1] == row.after)
            if not counts or count is None:
                continue
            own, ids, top = _told(logits[index], chosen[index], count)
            self.found[index] = Logprob(float(own), tuple(zip(ids.tolist(), top.tolist(), strict=True)))


def _of_prompt(logits: torch.Tensor, rows: PromptRows) -> PromptLogprobs:
    """Returns what is told of a prompt's tokens. Each row is reckoned alone, in little memory."""
    own, ranks, ids, top = [], [], [], []
    for row, token in enumerate(rows.tokens, start=rows.first):
        told, best, values = _told(logits[row], token, rows.count)
        own.append(told)
        ranks.append((logits[row] > logits[row, token]).sum() + 1)
        ids.append(best)
        top.append(values)
    return PromptLogprobs(
        array("f", torch.stack(own).tolist()),
        array("I", torch.stack(ranks).tolist()),
        array("I", torch.cat(ids).tolist()),
        array("f", torch.cat(top).tolist()),
    )


def _told(logits: torch.Tensor, token: int, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns of a row [V] the token's log-probability, the ids of the likeliest [count], and theirs [count]:
    float64, on the row's device."""
    if logits.device.type == "cpu" and np.isfinite(most := (row := logits.numpy()).max()):
        ids = likeliest(row, count)
        of = row[np.append(ids, token)].astype(np.float64) - most - log_normalizer(row, most)
        return torch.tensor(of[-1]), torch.from_numpy(ids), torch.from_numpy(of[:-1])
    whole = logits.double()
    whole -= whole.logsumexp(-1)
    best = whole.topk(min(count, len(whole)))
    return whole[token], best.indices, best.values
