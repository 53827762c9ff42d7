"""Bounds what drafters send before it is read, and tells which host sent it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from outrider.errors import TooLarge
from outrider.v1 import verifier_pb2

MAX_BATCH_BYTES = 2**20  # some thousand sessions' drafts
SPECULATE = "/outrider.v1.Verifier/Speculate"


def draft_batch(raw: bytes) -> verifier_pb2.DraftBatch:
    """Returns a drafter's message. Raises TooLarge before it is parsed, as it may grow hundredfold by that,
    and DecodeError if it is no message."""
    if len(raw) > MAX_BATCH_BYTES:
        raise TooLarge(f"a DraftBatch may have at most {MAX_BATCH_BYTES} bytes, not {len(raw)}")
    return verifier_pb2.DraftBatch.FromString(raw)


class BoundedDrafts(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Lets Speculate read its messages by draft_batch."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler_call_details.method != SPECULATE or handler is None or handler.stream_stream is None:
            return handler
        bounded: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            handler.stream_stream, draft_batch, handler.response_serializer
        )
        return bounded


def host_of(peer: str) -> str:
    """Returns the host in a gRPC peer's name, such as "ipv4:192.0.2.1:50051"."""
    return peer.rpartition(":")[0]
