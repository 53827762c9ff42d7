"""Our gRPC services behind Ray Serve's: its context is a copy that can carry a status, and nothing else."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from ray.serve.grpc_util import RayServegRPCContext

from outrider.errors import OutriderError
from outrider.net.rpc import status
from router.api.stream import internal_error

log = logging.getLogger(__name__)

T = TypeVar("T")
Method = Callable[[Any, Any], T]  # of a servicer: request, context


class Ended(Exception):
    """A call that ends with the status that its context has: Serve sends that one and logs this."""


class ServeContext:
    """A context with as much of grpc.aio.ServicerContext as our servicers use."""

    def __init__(self, context: RayServegRPCContext) -> None:
        self._context = context
        self._code: grpc.StatusCode | None = None
        self._trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        metadata: Sequence[tuple[str, str]] = self._context.invocation_metadata()
        return metadata

    async def send_initial_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Sends it with the end of the call: Serve sends none before."""
        self._trailing += metadata
        self._context.set_trailing_metadata(self._trailing)

    def code(self) -> grpc.StatusCode | None:
        """Returns the status with which the call was ended, if it was."""
        return self._code

    def time_remaining(self) -> float | None:
        """Returns None: Serve does not pass a client's deadline on."""
        return None

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: Sequence[tuple[str, str]] = ()
    ) -> NoReturn:
        self._code = code
        self._context.set_code(code)
        self._context.set_details(details)
        if trailing_metadata:
            self._context.set_trailing_metadata([*self._trailing, *trailing_metadata])
        raise Ended(f"{code.name}: {details}")

    @asynccontextmanager
    async def errors_as_status(self) -> AsyncIterator[None]:
        """Does what outrider.net.rpc's of that name does: no trace of any error reaches the client."""
        try:
            yield
        except (Ended, GeneratorExit):
            raise
        except OutriderError as error:
            await self.abort(status(error), error.message)
        except Exception:
            log.exception("a gRPC call failed")
            failure = internal_error()
            await self.abort(status(failure), failure.message)


async def call(method: Method[Awaitable[T]], request: Any, context: RayServegRPCContext) -> T:
    """Calls a servicer's method with one answer."""
    ours = ServeContext(context)
    async with ours.errors_as_status():
        return await method(request, ours)
    raise AssertionError("errors_as_status swallows nothing")


async def stream(
    method: Method[AsyncGenerator[T, None]], request: Any, context: RayServegRPCContext
) -> AsyncGenerator[T, None]:
    """Calls a servicer's method with a stream of answers. Closing it closes the method's generator."""
    ours = ServeContext(context)
    async with ours.errors_as_status(), aclosing(method(request, ours)) as responses:
        async for response in responses:
            yield response
