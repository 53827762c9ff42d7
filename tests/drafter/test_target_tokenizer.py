"""A draft model's worker learns its target's tokenizer from a target worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from demo import pair
from drafter.target_tokenizer import target_tokenizer
from outrider.engine.loading import load_tokenizer
from outrider.errors import StartupError
from outrider.net.rpc import add_methods, bind, new_server
from outrider.wire.description import TokenizerFiles
from outrider.wire.hello import Role
from outrider.wire.methods import GET_TOKENIZER


@asynccontextmanager
async def telling(files: TokenizerFiles) -> AsyncIterator[str]:
    async def get_tokenizer(asked: None, context: Any) -> TokenizerFiles:
        return files

    server = new_server()
    add_methods(server, {GET_TOKENIZER[Role.VERIFIER]: get_tokenizer})
    address = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


@pytest.fixture(scope="module")
def files() -> TokenizerFiles:
    return load_tokenizer(pair.TARGET)


async def test_it_is_the_workers_and_the_same_as_the_checkpoints(files: TokenizerFiles) -> None:
    async with telling(files) as address:
        assert await target_tokenizer(address) == files == await target_tokenizer(str(pair.TARGET))


@pytest.mark.parametrize("lie", ['{"version": "1.0"}', "[" * 10_000, None])
async def test_one_that_is_not_what_its_hash_says_is_refused(files: TokenizerFiles, lie: str | None) -> None:
    false = replace(files, json=lie) if lie is not None else replace(files, hash="0" * 64)
    async with telling(false) as address:
        with pytest.raises(StartupError, match="the worker there sent is not its own"):
            await target_tokenizer(address)


async def test_one_that_is_too_large_is_not_read(
    files: TokenizerFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.target_tokenizer.MAX_TOKENIZER_BYTES", 1000)
    async with telling(files) as address:
        with pytest.raises(StartupError, match=r"larger than max.*give the address of its ready line"):
            await target_tokenizer(address)


@pytest.mark.parametrize("target", ["127.0.0.1:1", str(Path("/nowhere/at/all"))])
async def test_nothing_there_is_told_in_a_sentence(target: str) -> None:
    with pytest.raises(StartupError) as error:
        await target_tokenizer(target)
    assert "\n" not in error.value.message and target in error.value.message
