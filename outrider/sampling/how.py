"""How a row's token is chosen: by its own parameters alone, whatever the other rows ask for."""

from __future__ import annotations

from enum import IntEnum

from outrider.sampling.params import SamplingParams


class How(IntEnum):
    """What a row's draw needs beside its logits."""

    GREEDY = 0  # nothing: the likeliest
    NOISY = 1  # temperature and noise
    WHOLE = 2  # its session's history or grammar, or all of its logits together


def how(params: SamplingParams) -> How:
    """Returns how tokens are chosen with these parameters."""
    if params.penalized or params.logit_bias:
        return How.WHOLE
    if params.greedy:
        return How.GREEDY
    return How.WHOLE if params.cut else How.NOISY
