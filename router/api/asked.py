"""A request that is being answered: its id, and what its line in the log says when it is over.

The line has counts and names, never anything of a prompt or an answer.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.errors import printable
from outrider.telemetry.logs import tell
from outrider.wire.trace_context import TraceContext
from router.api.acceptance import SpeculationStats
from router.api.output import Usage

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"  # of HTTP headers and gRPC metadata
GIVEN = re.compile(r"[!-~]{1,128}")  # what is worth to be given back: printable ASCII without blanks
MAX_ROUTE = 100  # characters of a path


@dataclass(slots=True)
class Asked:
    """What is known of it. Its sessions add what became of them."""

    id: str
    route: str
    trace: TraceContext | None = None  # where its client told one
    began: float = field(default_factory=time.perf_counter)
    model: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    first_at: float | None = None  # when the first of its tokens was there; None = there is none
    finish: list[str] = field(default_factory=list)  # the reasons, each once

    def asks(self, model: str, prompt_tokens: int) -> None:
        self.model, self.prompt_tokens = model, prompt_tokens

    def session_over(
        self, usage: Usage, speculation: SpeculationStats, finish: str, first_at: float | None
    ) -> None:
        """Takes in the end of one of its sessions. `first_at`: when its first token was there."""
        self.output_tokens += usage.completion_tokens
        self.accepted += speculation.accepted
        self.drafted += speculation.drafted
        if first_at is not None and (self.first_at is None or first_at < self.first_at):
            self.first_at = first_at
        if finish not in self.finish:
            self.finish.append(finish)

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.first_at is None else round(self.first_at - self.began, 4)

    @property
    def acceptance(self) -> float | None:
        """Returns the share of its draft tokens that were right; None = it had none."""
        return round(self.accepted / self.drafted, 4) if self.drafted else None

    def over(self, status: int | str, owner: str, generates: bool) -> None:
        """Writes its line. `status`: of HTTP or gRPC; `owner`: the name of its key."""
        level = logging.INFO if generates else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        answered = bool(self.model)
        tell(
            log,
            level,
            "request",
            {
                "request_id": self.id,
                "route": printable(self.route, MAX_ROUTE),
                "status": status,
                "key": owner or None,
                "model": self.model or None,
                "prompt_tokens": self.prompt_tokens if answered else None,
                "output_tokens": self.output_tokens if answered else None,
                "first_token_seconds": self.first_token_seconds,
                "seconds": round(time.perf_counter() - self.began, 4),
                "acceptance": self.acceptance,
                "finish": ",".join(self.finish) or None,
                "trace_id": None if self.trace is None else self.trace.trace,
            },
        )


_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)


def asked() -> Asked | None:
    """Returns the request that is being answered; None = nobody told of one."""
    return _asked.get()


def begin(route: str, given_id: str, trace: TraceContext | None) -> Asked:
    """Returns the request that is answered from now on, with its client's id or one that is made."""
    request_id = given_id if GIVEN.fullmatch(given_id) else f"req_{secrets.token_hex(16)}"
    request = Asked(request_id, route, trace)
    _asked.set(request)
    return request
