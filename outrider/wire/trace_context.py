"""Which trace a request belongs to, as W3C Trace Context (www.w3.org/TR/trace-context) has it: plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"  # of HTTP headers and gRPC metadata
MAX_STATE = 512  # characters: of a longer one nothing is handed on
WRITTEN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
STATE = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span, as others name it as their parent."""

    trace_id: int  # 128 bits, not 0
    span_id: int  # 64 bits, not 0
    flags: int = 0  # 8 bits; the lowest one: it is recorded
    state: str = ""  # what tracing systems of those before have added

    @classmethod
    def read(cls, parent: str | None, state: str | None = "") -> TraceContext | None:
        """Returns what the two headers say; None if the first is missing or not well-formed."""
        if not parent or len(parent) > MAX_STATE:
            return None
        found = WRITTEN.fullmatch(parent.strip())
        if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
            return None
        trace_id, span_id = int(found[2], 16), int(found[3], 16)
        if not trace_id or not span_id:
            return None
        kept = state if state and len(state) <= MAX_STATE and STATE.fullmatch(state) else ""
        return cls(trace_id, span_id, int(found[4], 16), kept)

    @classmethod
    def of(cls, message: Any) -> TraceContext | None:
        """Returns what a message says that has both as fields."""
        return cls.read(message.traceparent, message.tracestate)

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.span_id:016x}-{self.flags:02x}"

    @property
    def fields(self) -> dict[str, str]:
        """Returns both headers, or fields of a message, by name."""
        return {TRACEPARENT: self.traceparent, TRACESTATE: self.state}

    @property
    def trace(self) -> str:
        """Returns the trace's id as people see it."""
        return f"{self.trace_id:032x}"
