"""The gRPC conventions that all roles share: options, who may call what, errors as status codes."""

from __future__ import annotations

import hashlib
import inspect
import logging
import traceback
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc._cython import cygrpc

from outrider.errors import OutriderError, PeerRefused, StartupError
from outrider.net.descriptors import descriptors
from outrider.net.half_said import HALVES, peer_of
from outrider.net.metadata import TooMuchMetadata
from outrider.net.metadata import entries as metadata_entries
from outrider.net.questions import asked, places
from outrider.net.taking import taken_in_time
from outrider.net.tls import Credentials, Tls
from outrider.wire import methods
from outrider.wire.hello import Role
from outrider.wire.methods import Method

log = logging.getLogger(__name__)
# What a peer can cause as often as it likes, with a trace each: its answer has nobody to go to, or its
# metadata are no text, or too much.
PEERS_FAULTS = (
    "ExecuteBatchError",
    "Failed sending error status",
    "Invalid encoding",
    TooMuchMetadata.__name__,
)
logging.getLogger("grpc._cython.cygrpc").addFilter(
    lambda told: not any(fault in told.getMessage() for fault in PEERS_FAULTS)
)
cygrpc.traceback = SimpleNamespace(
    print_exc=lambda: None,  # of what is in the log already
    format_exception=traceback.format_exception,
)

MAX_MESSAGE_BYTES = 16 * 2**20  # received: a request of the largest body as token ids, or a batch of commits
HANDSHAKE_SECONDS = 10.0  # of who connects to a server, for TLS and the first of HTTP/2; by default 120
STOP_GRACE_SECONDS = 1.0  # what calls in progress are given when a server stops
MOST_CONNECTIONS = 8192  # of a server
IDLE_SECONDS = 60.0  # of a connection without calls; its client opens another with the next one
MOST_CALLS = 1024  # of one connection
MOST_PENDING = 2**14  # calls that have come to a server and were not looked at yet
PING_SECONDS = 2.0  # between pings of a connection on which nothing comes
# The same of a worker's server: a router has thousands of workers. They say something on streams every few
# seconds, and if a machine is gone that is not acknowledged: pings only find a process that stands still.
WORKER_PING_SECONDS = 10.0

_COMMON_OPTIONS: list[tuple[str, int]] = [
    # A peer that is silent (its machine gone, a cable pulled) is noticed after time + timeout.
    ("grpc.keepalive_time_ms", round(PING_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),  # this one ends the connection; by default only after a minute
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # No pings that ask how much may be on its way, but what they would find out: behind a large message in
    # a slow hop they get no answer in time, and a worker that idles would have one for each of its messages.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 2**20),
    # Nothing is unpacked: 16 KB may become 16 MiB, before anybody has looked at a key.
    ("grpc.per_message_decompression", 0),
]
_SERVER_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # By default gRPC cancels calls at random, whoever makes them, once a thousand wait: who opens thousands,
    # or opens and resets them, would end everybody's, and no worker's beats would get through.
    ("grpc.server.max_pending_requests", MOST_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
    ("grpc.so_reuseport", 0),  # a second process on the same port fails instead of stealing half the calls
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
]
_CHANNEL_OPTIONS = [
    *_COMMON_OPTIONS,
    ("grpc.enable_http_proxy", 0),  # peers are reached directly
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 2000),
]
_WATCHED_OPTIONS = [("grpc.keepalive_time_ms", 2**31 - 1)]


_ROUTERS, _DRAFTERS = frozenset({Role.ROUTER}), frozenset({Role.DRAFTER})
CALLERS: dict[str, frozenset[Role]] = {  # who may call a method, where their certificates say what they are
    methods.VERIFIER_SESSIONS.path: _ROUTERS,
    methods.SPECULATE.path: _DRAFTERS,
    methods.DRAFTER_SESSIONS.path: _ROUTERS,
    methods.BEAT.path: frozenset({Role.VERIFIER, Role.DRAFTER}),
    methods.LEAVE.path: frozenset({Role.VERIFIER, Role.DRAFTER}),
    methods.JOIN.path: _DRAFTERS,
}
COMMON_NAME, SUBJECT_NAMES = "x509_common_name", "x509_subject_alternative_name"
ROLE_URI = "outrider:"  # and a role: an alternative name of a certificate that is good for that role only


def check_certified(context: grpc.aio.ServicerContext[Any, Any], roles: frozenset[Role] | None) -> None:
    """Raises PeerRefused if the caller's certificate names roles (outrider:drafter) and none of these.

    If `roles` is None, any role will do.
    """
    named = {
        name.removeprefix(ROLE_URI) for name in _names(context, SUBJECT_NAMES) if name.startswith(ROLE_URI)
    }
    if roles is not None and named and not named & {role.name.lower() for role in roles}:
        wanted = " or ".join(sorted(role.name.lower() for role in roles))
        raise PeerRefused(f"this is for a {wanted}; the caller's certificate is a {' or '.join(named)}'s")


def caller(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Returns a name for the certificate that the caller showed: the same for all that have the same names in
    them, so that a renewed one stands for the former. Empty if none was shown."""
    names = [name for kind in (COMMON_NAME, SUBJECT_NAMES) for name in sorted(_names(context, kind))]
    return hashlib.sha256("\n".join(names).encode()).hexdigest() if names else ""


def _names(context: grpc.aio.ServicerContext[Any, Any], kind: str) -> list[str]:
    return [name.decode(errors="replace") for name in context.auth_context().get(kind, ())]


def most_connections(share: int = 2) -> int:
    """Returns how many a server may have: one in so many of this process's descriptors."""
    return min(MOST_CONNECTIONS, descriptors() // share)


def new_server(share: int = 2, ping_seconds: float = PING_SECONDS) -> grpc.aio.Server:
    """Returns a server with the options that all roles share. Errors that its handlers raise become status
    codes. Its connections have one in `share` of the descriptors of this process, and are pinged so often.

    A message of more than MAX_MESSAGE_BYTES ends its call with RESOURCE_EXHAUSTED before it is read.
    """
    options = {
        **dict(_SERVER_OPTIONS),
        "grpc.server_handshake_timeout_ms": round(HANDSHAKE_SECONDS * 1000),
        "grpc.max_allowed_incoming_connections": most_connections(share),
        "grpc.max_connection_idle_ms": round(IDLE_SECONDS * 1000),
        "grpc.max_concurrent_streams": MOST_CALLS,
        "grpc.keepalive_time_ms": round(ping_seconds * 1000),
    }
    return grpc.aio.server(interceptors=[_ErrorInterceptor()], options=list(options.items()))


def add_methods(
    server: grpc.aio.Server,
    behaviours: Mapping[Method[Any, Any], Callable[..., Any]],
    admit: Callable[[grpc.aio.ServicerContext[Any, Any], int], None] | None = None,
    decoded: bool = True,
) -> None:
    """Lets a server answer methods. A behaviour is called with what was asked, as plain data, and gRPC's
    context; a stream's, with an iterator, and it yields what it answers. Bytes that are no message raise
    InvalidRequest there. `admit` is called with the number of bytes of a question before they are decoded,
    and raises if they are not to be. If not `decoded`, a behaviour gets the bytes of what was asked."""
    services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = {}
    for method, behaviour in behaviours.items():
        make = (
            grpc.stream_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
        )
        if admit is None:
            handler = make(behaviour, method.asked.from_bytes if decoded else None, method.answered.to_bytes)
        else:
            assert not method.streams, "a stream has an allowance of its own"
            handler = make(_admitted(admit, method, behaviour), None, method.answered.to_bytes)
        services.setdefault(method.service, {})[method.name] = handler
    for service, handlers in services.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


def _admitted(
    admit: Callable[[grpc.aio.ServicerContext[Any, Any], int], None],
    method: Method[Any, Any],
    behaviour: Callable[..., Any],
) -> Callable[..., Any]:
    async def answer(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        admit(context, len(raw))
        return await behaviour(method.asked.from_bytes(raw), context)

    return answer


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    *,
    flag: str = "--port",
    tls: Tls | None = None,
    mutual: bool = True,
) -> str:
    """Opens host:port (port 0: any free one) and returns the "host:port" that it got.

    With `tls` the connection is encrypted; with `mutual` the caller must show a certificate. Raises
    StartupError, which names `flag`, if the address cannot be had.
    """
    bracketed = f"[{host}]" if ":" in host else host
    address = f"{bracketed}:{port}"
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.server_credentials(mutual))
    except RuntimeError:
        raise StartupError(
            f"cannot listen on {bracketed}:{port}: the port is in use or the address is not this machine's; "
            f"choose another with {flag} or --host"
        ) from None
    return f"{bracketed}:{bound}"


def channel(
    address: str,
    tls: Credentials | None = None,
    max_receive_bytes: int = MAX_MESSAGE_BYTES,
    *,
    watched: bool = False,
) -> grpc.aio.Channel:
    """Returns a channel to host:port that notices a silent peer within seconds and reconnects by itself. One
    that is `watched` does not: its streams have signs of life of their own (outrider/net/heartbeat.py).

    With `tls` the peer shows a certificate, and so does this end if it has one. The channel keeps the
    certificates that it was made with, so a long-lived one must be made anew after a renewal. A message of
    more than `max_receive_bytes` ends its call with RESOURCE_EXHAUSTED.
    """
    options = [*_CHANNEL_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes)]
    if watched:
        options += _WATCHED_OPTIONS
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


async def ask(
    connection: grpc.aio.Channel, method: Method[Asked, Answered], question: Asked, seconds: float
) -> Answered:
    """Returns the answer to one question. Raises AioRpcError as gRPC does, after so many seconds as well,
    and InvalidRequest if the answer's bytes are no message."""
    call = connection.unary_unary(method.path, method.asked.to_bytes, None)
    return method.answered.from_bytes(await call(question, timeout=seconds))


_STATUS: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def status(error: OutriderError) -> grpc.StatusCode:
    """Returns the status that ends a call with this error."""
    return _STATUS[error.grpc_code]


@asynccontextmanager
async def errors_as_status(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the call with the status of an OutriderError. Any other error is logged and told as INTERNAL."""
    try:
        yield
    except OutriderError as error:
        await context.abort(status(error), error.message)
    except grpc.aio.BaseError:
        raise  # the handler's own abort, or a call that is over already
    except Exception:
        log.exception("a gRPC handler failed")
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")


@asynccontextmanager
async def _left_lightly() -> AsyncIterator[None]:
    """An error that ends a call leaves without what the frames hold that it came through: the question above
    all. gRPC's own frames are in a cycle with it, so that all would stay until the collector's next round,
    which comes after so many objects, however many bytes they are."""
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__context__
        raise


class _ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Wraps every asynchronous handler in errors_as_status, lets only its CALLERS in, and ends calls whose
    first message does not come: otherwise each would hold its memory for as long as its caller likes."""

    def __init__(self) -> None:
        self._unasked = places()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        metadata_entries.all_made()
        handler = await continuation(handler_call_details)
        if handler is None:  # an unknown method
            return handler
        roles = CALLERS.get(handler_call_details.method)
        answers = _arity(handler.response_streaming)
        # The question of a unary call is read here, too: gRPC would wait for it without end.
        make = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        behaviour = getattr(handler, f"{_arity(handler.request_streaming)}_{answers}")
        generates = inspect.isasyncgenfunction(behaviour)
        if not generates and not inspect.iscoroutinefunction(behaviour):
            raise TypeError("handlers are asynchronous here")
        decode, streaming = handler.request_deserializer, handler.request_streaming
        behaviour = asked(handler_call_details.method, behaviour, decode, streaming, generates, self._unasked)
        # Bytes that are no message are for the behaviour to refuse: gRPC itself would log a trace for each.
        to_bytes = handler.response_serializer or bytes
        writes_itself = handler.response_streaming and not generates
        guarded = _guarded(behaviour, roles, generates, None if writes_itself else to_bytes)
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(guarded, None, to_bytes if writes_itself else None)
        return wrapped


def _arity(streaming: bool) -> str:
    return "stream" if streaming else "unary"


def _guarded(
    behaviour: Callable[..., Any],
    roles: frozenset[Role] | None,
    generates: bool,
    to_bytes: Callable[[Any], bytes] | None,
) -> Callable[..., Any]:
    """`to_bytes`: of what it answers; None = it writes that by itself."""
    if generates and to_bytes is not None:
        # Written here, not yielded on: so a call that is cancelled closes the generator at once.
        async def guarded_stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            peer = peer_of(context.peer())
            async with _left_lightly(), errors_as_status(context), taken_in_time(context) as write:
                check_certified(context, roles)
                async with aclosing(await behaviour(request, context)) as responses:
                    async for response in responses:
                        raw = to_bytes(response)
                        HALVES.wrote(peer, len(raw))
                        await write(raw)

        return guarded_stream

    async def guarded_call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        peer = peer_of(context.peer())
        async with _left_lightly(), errors_as_status(context):
            check_certified(context, roles)
            answer = await behaviour(request, context)
            if to_bytes is None:
                return answer
            raw = to_bytes(answer)
            HALVES.wrote(peer, len(raw))
            return raw

    return guarded_call
