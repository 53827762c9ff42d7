"""This machine's clock against another one."""

from __future__ import annotations

from outrider_cli.doctor.finding import Finding

MOST_SECONDS = 2.0  # apart


def clock_against(whose: str, here: float, there: float, unsure: float) -> Finding:
    """Returns how far apart two clocks are: unix seconds at one moment, known to `unsure` seconds."""
    apart = here - there
    if abs(apart) <= MOST_SECONDS + unsure:
        return Finding("clock", f"within {MOST_SECONDS + unsure:.1f} s of {whose}")
    way = "ahead of" if apart > 0 else "behind"
    said = f"it is {abs(apart):.0f} s {way} {whose}"
    todo = "set both by NTP: certificates begin and end by them, and logs are compared by them"
    return Finding("clock", said, todo)
