"""What a process says of itself, and where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from outrider.options.option import check, option, wrong

EXTRA = "outrider[otel]"
URL = re.compile(r"https?://[^\s/@?#]+(/[^\s?#]*)?")
VARIABLES = (  # opentelemetry.io/docs/specs/otel/protocol/exporter
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class Logging:
    """What a process logs to stderr."""

    HEADING: ClassVar = "Logs and traces"

    log_level: str = option(
        "warning",
        "From which on to log; at info the router has a line for each request. Prompts, answers and secrets "
        "never are.",
        choices=LEVELS,
    )
    log_format: str = option("text", "How to log: lines of text, or of JSON.", choices=FORMATS)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Export:
    """Whether traces and metrics are sent to a collector."""

    HEADING: ClassVar = "Logs and traces"

    otlp_endpoint: str | None = option(
        None,
        "Collector that gets traces, and of the router metrics, by OTLP: http://HOST:PORT or https://. Needs "
        "outrider[otel].",
        metavar="URL",
        shown="as $OTEL_EXPORTER_OTLP_ENDPOINT says, or none",
    )
    from_environment: bool = False  # whether its variables name a collector

    def __post_init__(self) -> None:
        check(self)
        if self.otlp_endpoint is None:
            return
        if not URL.fullmatch(self.otlp_endpoint):
            secret = "@" in self.otlp_endpoint  # what stands before it may be a password
            told = "" if secret else f", not {self.otlp_endpoint!r}"
            raise wrong("otlp_endpoint", f"must be http://HOST:PORT or https://HOST:PORT{told}")
        if not exporters_installed():
            raise wrong("otlp_endpoint", f"needs what is not installed here: pip install '{EXTRA}'")

    @property
    def wanted(self) -> bool:
        return self.otlp_endpoint is not None or self.from_environment


def exporters_installed() -> bool:
    try:
        return all(find_spec(f"opentelemetry.exporter.otlp.proto.{kind}") for kind in ("http", "grpc"))
    except ModuleNotFoundError:  # not even what they are part of
        return False


def named_in(environment: Mapping[str, str]) -> bool:
    """Returns whether OpenTelemetry's variables name a collector, and do not switch all of it off."""
    off = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not off and any(environment.get(name) for name in VARIABLES)
