"""What workers can cost others by what they say, and by coming and going: each case once slowed all of a
router's sessions, or kept sound workers out."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from outrider.v1 import verifier_pb2
from outrider.wire.codec import tokenizer_to_wire
from outrider.wire.hello import Role
from router import prefixes
from router import worker_discovery as discovery_module
from router.prefixes import MOST_SIZES, PromptBlocks
from router.session import Session
from router.session_draft import LOOK_TOKENS, MOST_LOST
from router.worker_discovery import MOST_FETCHES
from tests.router.asking import Running, committed, request


async def test_a_session_does_not_follow_drafters_that_come_and_go_without_end(rig: Any) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request(max_tokens=500))
    opened = await verifier.next_command("open")

    async def comes(number: int) -> Any:
        return await rig.drafter(f"d{number}", fingerprint=f"model {number}")

    for number in range(MOST_LOST):
        drafter = await comes(number)
        await drafter.next_command("open")
        await drafter.stop()
        await rig.until(lambda: not rig.fleet.drafters)
    sound = await comes(MOST_LOST)
    verifier.say(**committed(opened.session_id, 3, *[20] * (LOOK_TOKENS - 1)))
    await rig.until(lambda: len(running.events) == 1)
    assert sound.commands.empty()
    verifier.say(**committed(opened.session_id, 3 + LOOK_TOKENS - 1, 20))
    await sound.next_command("open")
    running.task.cancel()


async def test_drafters_that_come_hold_the_loop_for_one_session_at_a_time(rig: Any) -> None:
    await rig.verifier()
    asks = [Running(rig, request()) for _ in range(4)]
    await rig.until(lambda: len(rig.sessions.open) == 4)
    await rig.until(lambda: all(not one.unplaced for one in rig.sessions.open.values()))
    drafters_at_once: list[int] = []
    rig.fleet.on_drafter_joined.append(
        lambda: drafters_at_once.append(rig.fleet.drafters["d"].placed)  # after the sessions have heard it
    )
    drafter = await rig.drafter()
    assert drafters_at_once == [0]
    for _ in asks:
        await drafter.next_command("open")
    for asked in asks:
        asked.task.cancel()


async def test_a_prompt_is_hashed_for_few_sizes_of_blocks_whatever_verifiers_say_that_theirs_is(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []

    def counted(tokens: Any, size: int, salt: bytes = b"") -> list[int]:
        hashed.append(size)
        return []

    monkeypatch.setattr(prefixes, "block_hashes", counted)
    blocks = PromptBlocks((1, 2, 3))
    for size in (16, 16, 1, 2, 3, 4, 5, 16):
        assert blocks.of(size) == []
    assert len(hashed) == MOST_SIZES
    hashed.clear()
    monkeypatch.setattr("router.fleet.FEW", 1)
    for number, (model, size) in enumerate(
        [("m", 16), ("m", 16), *(("other", size) for size in range(1, 9))]
    ):
        worker = await rig.worker(Role.VERIFIER, f"v{number}", model=model, fingerprint=model)
        worker.info = replace(worker.info, kv_block_size=size)
        worker.register(rig.address)
    await rig.until(lambda: len(rig.fleet.verifiers) == 10)
    running = Running(rig, request())
    await rig.until(lambda: any(verifier.placed for verifier in rig.fleet.verifiers.values()))
    assert set(hashed) == {16}
    running.task.cancel()


async def test_that_sessions_wait_at_one_verifier_costs_others_reports_nothing_for_all_sessions(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may only say so, for ever."""
    sound = await rig.verifier("sound")
    asks = [Running(rig, request()) for _ in range(3)]
    for _ in asks:
        await sound.next_command("open")
    says_full = await rig.verifier("full")
    says_full.say(load=verifier_pb2.VerifierLoad(waiting=1, kv_usage=1.0))
    await rig.until(lambda: bool(rig.fleet.waiting))
    looked: list[Session] = []
    monkeypatch.setattr(Session, "unbegun", property(looked.append))
    sound.say(load=verifier_pb2.VerifierLoad(running=3, step_tokens=5))
    await rig.until(lambda: rig.fleet.verifiers["sound"].load.step_tokens == 5)
    assert not looked
    for asked in asks:
        asked.task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*(asked.task for asked in asks))


async def test_verifiers_that_do_not_answer_keep_no_other_of_their_kind_waiting(rig: Any) -> None:
    over = asyncio.Event()

    async def mute() -> Any:
        await over.wait()
        raise AssertionError("nobody waits for it")

    for number in range(3):
        worker = await rig.worker(Role.VERIFIER, f"mute {number}")
        worker.tokenizer_sent = mute
        worker.register(rig.address)
    await rig.until(lambda: len(rig.discovery._records) == 3)
    await rig.verifier("sound")
    assert rig.discovery._fetches._value == MOST_FETCHES - 3  # they are waited for still
    over.set()


async def test_tokenizers_that_are_kept_are_bounded(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_module, "MOST_TOKENIZERS", 100)

    def sends(worker: Any, size: int) -> None:
        async def send() -> Any:
            return tokenizer_to_wire(replace(worker.tokenizer, json="x" * size))

        worker.tokenizer_sent = send

    for number, size in enumerate((60, 60)):
        worker = await rig.worker(
            Role.VERIFIER, f"v{number}", model=f"m{number}", fingerprint=f"{number}", tokenizer=f"{number}"
        )
        sends(worker, size)
        worker.register(rig.address)
        told = await worker.states.get()
        assert told[0] is None if number else told[0] is not None
    assert "keeps the tokenizers" in told[1]
    sends(worker, 40)
    await rig.until(lambda: len(rig.fleet.verifiers) == 2)
