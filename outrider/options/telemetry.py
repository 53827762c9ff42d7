"""What a process says of itself, and where."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.options.option import check, option

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Logging:
    """What a process logs to stderr."""

    log_level: str = option(
        "warning",
        "From which on to log; at info the router has a line for each request. Prompts, answers and secrets "
        "never are.",
        choices=LEVELS,
    )
    log_format: str = option("text", "How to log: lines of text, or of JSON.", choices=FORMATS)

    def __post_init__(self) -> None:
        check(self)
