"""What sends a process's spans to a collector, if somebody wants them. It is loaded only then."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outrider.options.telemetry import EXTRA, Export, exporters_installed

if TYPE_CHECKING:
    from outrider.telemetry.otlp import Otlp
    from outrider.wire.hello import Identity

log = logging.getLogger(__name__)


def tracer_of(export: Export, identity: Identity) -> Otlp | None:
    """Returns what sends this process's spans to a collector; None = nobody wants them."""
    if not export.wanted:
        return None
    if not exporters_installed():
        log.warning("the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT): install %s", EXTRA)
        return None
    from outrider.telemetry.otlp import Otlp

    return Otlp(export.otlp_endpoint, identity)
