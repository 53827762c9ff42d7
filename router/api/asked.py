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
from outrider.telemetry.spans import Span, Tracer, set_current_trace
from outrider.wire.trace_context import TraceContext
from router.api.acceptance import SpeculationStats
from router.api.output import Usage
from router.api.validation import Generation

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"  # of HTTP headers and gRPC metadata
GIVEN = re.compile(r"[!-~]{1,128}")  # what is worth to be given back: printable ASCII without blanks
FAILED = ("UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNIMPLEMENTED", "DEADLINE_EXCEEDED")  # of gRPC
NOBODY = (401, "UNAUTHENTICATED")  # whoever asks has shown no key
MAX_ROUTE = 100  # characters of a path


@dataclass(slots=True)
class Asked:
    """What is known of it. Its sessions add what became of them."""

    id: str
    route: str
    trace: TraceContext | None = None  # its own span's, or its client's
    shape: str = "chat"  # what is asked for: that, or a "completion"
    span: Span | None = None  # None = nobody asks for it
    began: float = field(default_factory=time.perf_counter)
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    first_at: float | None = None  # when the first of its tokens was there; None = there is none
    finish: list[str] = field(default_factory=list)  # the reasons, each once

    def asks(self, generation: Generation) -> None:
        prompts = generation.sessions[:: generation.n]
        self.model, self.prompt_tokens = prompts[0].model, sum(len(one.params.prompt) for one in prompts)
        if self.span is None:
            return
        params = prompts[0].params
        operation = "text_completion" if self.shape == "completion" else "chat"
        self.span.rename(f"{operation} {self.model}")
        self.span.set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "outrider",
                "gen_ai.request.model": self.model,
                "gen_ai.response.model": self.model,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.choice.count": generation.n,
                "gen_ai.request.seed": generation.seed,
                "gen_ai.request.temperature": params.sampling.temperature,
                "gen_ai.request.top_p": params.sampling.top_p,
                "gen_ai.usage.input_tokens": self.prompt_tokens,
            }
        )

    def session_over(
        self, usage: Usage, speculation: SpeculationStats, finish: str, first_at: float | None
    ) -> None:
        """Takes in the end of one of its sessions. `first_at`: when its first token was there."""
        self.cached_tokens += usage.cached_prompt_tokens
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
        """Writes its line, and ends its span. `status`: of HTTP or gRPC; `owner`: the name of its key."""
        if self.span is not None:
            self._end(self.span, status, owner)
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

    def _end(self, span: Span, status: int | str, owner: str) -> None:
        if status in NOBODY:  # one that does not end is not sent, and takes no place of others' that wait
            return
        http = isinstance(status, int)
        span.set({"http.response.status_code" if http else "rpc.response.status_code": status})
        if owner:
            span.set({"outrider.key": owner})
        if self.model:
            span.set(
                {
                    "gen_ai.usage.output_tokens": self.output_tokens,
                    "gen_ai.usage.cache_read.input_tokens": self.cached_tokens,
                    "gen_ai.response.finish_reasons": self.finish,
                    "outrider.draft_tokens": self.drafted,
                    "outrider.accepted_tokens": self.accepted,
                }
            )
        if (first := self.first_token_seconds) is not None:
            span.set({"gen_ai.response.time_to_first_chunk": first})
        failed = status >= 500 if isinstance(status, int) else status in FAILED
        span.end(str(status) if failed else "error" if "error" in self.finish else "")


_asked: ContextVar[Asked | None] = ContextVar("asked", default=None)


def asked() -> Asked | None:
    """Returns the request that is being answered; None = nobody told of one."""
    return _asked.get()


def asks_for(shape: str) -> None:
    """Notes what the request that is being answered asks for."""
    if (request := asked()) is not None:
        request.shape = shape


def begin(
    route: str, given_id: str, trace: TraceContext | None, tracer: Tracer | None = None, rpc: bool = False
) -> Asked:
    """Returns the request that is answered from now on, with its client's id or one that is made. `trace`:
    its client's; `tracer`: None = it has no span; `rpc`: it came over gRPC."""
    request_id = given_id if GIVEN.fullmatch(given_id) else f"req_{secrets.token_hex(16)}"
    request = Asked(request_id, route, trace)
    if tracer is not None:
        kind, _, path = route.partition(" ")
        told = {"http.request.method": kind, "url.path": printable(path, MAX_ROUTE)}
        if rpc:
            told = {"rpc.system.name": "grpc", "rpc.method": route}
        told["outrider.request.id"] = request_id
        name = route if rpc else kind  # collectors count by it: nothing that clients make up
        request.span = tracer.start(name, trace, told, server=True)
        request.trace = request.span.context
    set_current_trace(request.trace)
    _asked.set(request)
    return request
