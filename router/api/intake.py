"""From a request that has been read to the sessions that answer it: the one way of both transports."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.errors import ContextExceeded, Unavailable
from outrider.wire.session import new_session_id
from router.api.access import count_sessions, owner
from router.api.cache_salt import cache_salt, tenant
from router.api.deadline import TimeLimits
from router.api.line import Line
from router.api.reading import AS_THE_TEMPLATE_SAYS, Formats
from router.api.record import named
from router.api.threads import Threads
from router.api.validation import (
    Body,
    DrawBelow,
    Generation,
    choices,
    prepare,
    prepared_in,
)
from router.requests import SessionRunner


@dataclass(frozen=True, slots=True)
class Intake:
    """What holds for all requests of a router."""

    runner: SessionRunner
    draw_below: DrawBelow  # draws seeds (`secrets.randbelow`)
    threads: Threads = field(default_factory=Threads)  # those that read requests
    line: Line = field(default_factory=Line)  # in which they wait before they are read
    share_prefixes: bool = False  # among all keys
    formats: Formats = AS_THE_TEMPLATE_SAYS

    async def take(self, body: Body, size: int, limits: TimeLimits) -> Generation:
        """Returns the sessions of a request of so many bytes, each with its id. Raises InvalidRequest that
        names the field at fault, UnknownModel, Unavailable and Overloaded."""
        sessions = choices(body)
        count_sessions(sessions)
        model = self.runner.model(body.model)
        self.runner.check_room(owner(), sessions)
        try:
            prepared = await self.threads.run(
                prepared_in(body, size),
                owner(),
                limits.first_token_by,
                prepare,
                body,
                model,
                self.draw_below,
                self.formats,
            )
        except ContextExceeded as error:
            if model.absent_context <= model.max_context:
                raise
            raise Unavailable(
                f"{error.message} now; one that holds {model.absent_context} was here a moment ago"
            ) from None
        salt = cache_salt("" if self.share_prefixes else owner(), body.cache_salt)
        own = prepared.of_tenant(tenant(owner()), salt)
        return named(own, new_session_id()).until(limits)
