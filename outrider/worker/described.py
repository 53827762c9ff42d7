"""What every worker tells of itself, whoever asks: its model, its tokenizer, its health, and its services."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from outrider.net.grpc_health import add_health
from outrider.net.rpc import add_methods
from outrider.wire.description import TokenizerFiles, WorkerInfo
from outrider.wire.methods import GET_INFO, GET_TOKENIZER


def add_description(
    server: grpc.aio.Server, info: WorkerInfo, tokenizer: TokenizerFiles, well: Callable[[], bool]
) -> None:
    """Lets a worker's server answer GetInfo and GetTokenizer, the standard health service (SERVING while
    `well()`) and server reflection."""

    async def get_info(asked: None, context: Any) -> WorkerInfo:
        return info

    async def get_tokenizer(asked: None, context: Any) -> TokenizerFiles:
        return tokenizer

    role = info.identity.role
    add_methods(server, {GET_INFO[role]: get_info, GET_TOKENIZER[role]: get_tokenizer})
    add_health(server, well, GET_INFO[role].service)
