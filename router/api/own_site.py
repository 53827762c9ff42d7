"""Where no keys are asked for, whoever reaches this machine's loopback address may ask. So could every page
that a browser on it shows: by a form, or by a name of its own that suddenly means 127.0.0.1. These are
refused."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.errors import InvalidRequest
from router.api.refusals import refusal

FORBIDDEN = 403
NOBODYS = (
    "localhost",
    "local",
    "internal",
)  # ends of names that no site can have: RFC 6761, RFC 6762, ICANN's
SCARCE = frozenset({"/v1/live"})  # what a page could take away: few may listen at a time
HARMLESS = frozenset({"GET", "HEAD", "OPTIONS"})  # of what they get, a browser shows another site nothing


class OwnSite:
    """ASGI middleware. `origins`: of pages that may ask."""

    def __init__(self, app: ASGIApp, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._why_not(scope)):
            await refusal(InvalidRequest(why), scope["path"], FORBIDDEN)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _why_not(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        if (origin := headers.get("origin", "")) in self._origins or "*" in self._origins:
            return None
        host = headers.get("host", "")
        if _loopback(scope.get("server")) and not _means_this_machine(host):
            return (
                f"this service asks for no key, and answers at this machine's own address to its own names "
                f"only, not to {host}: use API keys, or let the proxy before it set Host"
            )
        relation = headers.get("sec-fetch-site")
        if scope["method"] in HARMLESS:
            foreign = scope["path"] in SCARCE and relation == "cross-site"
        else:
            foreign = _foreign(origin, host, relation)
        if foreign:
            return f"a page of {origin or 'another site'} may not ask here: name it by --cors-origin"
        return None


def _foreign(origin: str, host: str, relation: str | None) -> bool:
    """Returns whether a page of another site asks. `relation`: what the browser says of the two; it says
    nothing in the clear, but to localhost, 127.0.0.1 and [::1]. `http://0.0.0.0` leads here, too."""
    if not origin.startswith(("http", "null")):
        return False
    return relation == "cross-site" or (relation is None and origin.partition("://")[2] != host)


def _loopback(server: tuple[str, int | None] | None) -> bool:
    return server is not None and _address(server[0].removeprefix("::ffff:")) == "loopback"


def _address(name: str) -> str | None:
    """Returns what kind of an address it is; None = it is none."""
    try:
        return "loopback" if ip_address(name).is_loopback else "other"
    except ValueError:
        return None


def _means_this_machine(host: str) -> bool:
    """Returns whether no site can have this name: it is an address, has no dots, or has a special end."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    return "." not in name or _address(name) is not None or name.rpartition(".")[2] in NOBODYS
