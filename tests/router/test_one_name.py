"""Verifiers that come with different checkpoints of one name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.errors import PeerRefused
from outrider.wire.codec import tokenizer_to_wire
from outrider.wire.description import TokenizerFiles
from outrider.wire.hello import Identity, Role


async def test_of_two_models_of_one_name_the_one_that_came_first_is_taken_whichever_is_reached_first(
    rig: Any,
) -> None:
    """Each had been refused by the router that had reached the other first, and both had ended."""
    asked, reached = asyncio.Event(), asyncio.Event()
    first = await rig.worker(Role.VERIFIER, "first", fingerprint="good")

    async def send() -> Any:
        asked.set()
        await reached.wait()
        return tokenizer_to_wire(first.tokenizer)

    first.tokenizer_sent = send
    first.register(rig.address)
    await asked.wait()
    other = await rig.worker(Role.VERIFIER, "other", fingerprint="bad")
    refused = other.register(rig.address)
    while "first came first" not in (state := (await other.states.get()))[1]:
        assert state[0] is None
    assert not rig.fleet.verifiers
    reached.set()
    await rig.until(lambda: "first" in rig.fleet.verifiers)
    with pytest.raises(PeerRefused, match="with a different checkpoint"):
        await refused
    assert list(rig.fleet.verifiers) == ["first"]


async def test_who_came_first_and_is_gone_is_not_waited_for(rig: Any) -> None:
    first = await rig.worker(Role.VERIFIER, "first", fingerprint="good")
    first.address = "127.0.0.1:1"
    registered = first.register(rig.address)
    assert (await first.states.get())[0] is None
    (await rig.worker(Role.VERIFIER, "other", fingerprint="bad")).register(rig.address)
    registered.cancel()
    await rig.until(lambda: "other" in rig.fleet.verifiers)


async def test_what_another_process_at_its_address_reads_is_not_taken_for_the_tokenizer_of_its_model(
    rig: Any,
) -> None:
    """A verifier of another model had been started in its place, and its record was there for seconds still:
    another one of its model got that tokenizer, and all its text was wrong."""
    asked = asyncio.Event()
    in_its_place = Identity(Role.VERIFIER, "new", 2, "other model", "other tokens")
    gone = await rig.worker(Role.VERIFIER, "gone", answers_as=in_its_place)

    async def send() -> Any:
        asked.set()
        return tokenizer_to_wire(TokenizerFiles("other tokens", "json of other tokens", ""))

    gone.tokenizer_sent = send
    gone.register(rig.address)
    await asked.wait()
    router, complaint = await gone.states.get()
    assert router is None and "another process" in complaint
    await rig.verifier("sound")
    (model,) = rig.fleet.models()
    assert model.tokenizer.json == "json of tokens"
