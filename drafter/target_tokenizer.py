"""The tokenizer of the target that a draft model drafts for: of a checkpoint, or of a worker that has it."""

from __future__ import annotations

import asyncio
import re

import grpc.aio
import tokenizers

from outrider.engine.tokenizer import load_tokenizer, table_hash
from outrider.errors import OutriderError, StartupError
from outrider.net.rpc import ask, channel
from outrider.net.tls import Tls
from outrider.wire.description import TokenizerFiles
from outrider.wire.hello import Role
from outrider.wire.methods import GET_TOKENIZER, MAX_TOKENIZER_BYTES

ANSWER_SECONDS = 10.0
ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[^/:]+):[0-9]{1,5}")


async def target_tokenizer(target: str, tls: Tls | None = None) -> TokenizerFiles:
    """Returns it. `target` is a folder, a file, a hub id, or the host:port of a target worker. Raises
    StartupError."""
    if ADDRESS.fullmatch(target) is None:
        return await asyncio.to_thread(load_tokenizer, target)
    return await _fetched(target, tls)


async def _fetched(address: str, tls: Tls | None) -> TokenizerFiles:
    try:
        async with channel(address, tls, MAX_TOKENIZER_BYTES) as connection:
            files = await ask(connection, GET_TOKENIZER[Role.VERIFIER], None, ANSWER_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise StartupError(
            f"--target {address}: no target worker tells its tokenizer there "
            f"({error.details() or error.code().name}); give the address of its ready line, or its checkpoint"
        ) from None
    except OutriderError as error:
        raise StartupError(f"--target {address}: {error.message}") from None
    if await asyncio.to_thread(_hash, files) != files.hash:
        raise StartupError(f"--target {address}: the tokenizer that the worker there sent is not its own")
    return files


def _hash(files: TokenizerFiles) -> str | None:
    try:
        return table_hash(tokenizers.Tokenizer.from_str(files.json).get_vocab())
    except Exception:  # the library raises plain ones
        return None
