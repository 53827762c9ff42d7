"""Workers that say nothing: who is given up, when, and what that costs."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from outrider.errors import Unavailable
from outrider.net.commands import together
from outrider.net.heartbeat import SILENCE_SECONDS
from outrider.v1 import drafter_pb2, verifier_pb2
from outrider.wire.hello import Role
from router.losses import MAX_LOSSES
from tests.router.asking import Running, committed, finished, request


async def test_a_silent_verifier_is_given_up_and_its_session_goes_on_at_one_that_beats(rig: Any) -> None:
    silent, other = await rig.verifier("v1"), await rig.verifier("v2")
    other.load = silent.load
    running = Running(rig, request())
    await rig.until(lambda: not (silent.commands.empty() and other.commands.empty()))
    if silent.commands.empty():
        silent, other = other, silent
    opened = await silent.next_command("open")
    silent.say(**committed(opened.session_id, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    silent.beats = False
    moved = await other.next_command("open")
    assert (moved.session_id, list(moved.output)) == (opened.session_id, [10])
    await silent.stream_over.wait()
    assert not other.stream_over.is_set()
    other.say(**committed(moved.session_id, 4, 11, 3), **finished(moved.session_id))
    assert len(await running.task) == 3


async def test_a_worker_that_beats_again_is_taken_in_again(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.workers.IDLE_SILENCE_SECONDS", SILENCE_SECONDS)
    worker = await rig.verifier("v")
    held = rig.fleet.verifiers["v"]
    worker.beats = False
    await worker.stream_over.wait()
    worker.beats = True
    await rig.until(lambda: rig.fleet.verifiers.get("v") not in (None, held))
    running = Running(rig, request())
    opened = await worker.next_command("open")
    worker.say(**committed(opened.session_id, 3, 1, 2, 3), **finished(opened.session_id))
    assert len(await running.task) == 2


async def test_a_worker_that_does_not_answer_the_hello_is_told_so_and_not_taken_in(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.ANSWER_SECONDS", 0.2)
    model = await rig.worker(Role.VERIFIER, "v")

    class Mute(type(model)):  # type: ignore[misc]
        async def Sessions(self, request_iterator: Any, context: Any) -> None:
            await asyncio.Event().wait()

    mute = Mute(model.info, model.tokenizer, model.answers_as)
    rig.workers.append(mute)
    await mute.start()
    mute.register(rig.address)
    taken_in_by, reason = await mute.states.get()
    assert taken_in_by is None and "did not answer the router's hello" in reason
    assert not rig.fleet.verifiers


async def test_a_worker_that_lets_commands_pile_up_is_given_up_and_taken_in_again(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.MAX_UNSENT_COMMANDS", 2)
    worker = await rig.verifier("v")
    held = rig.fleet.verifiers["v"]
    for number in range(4):
        await rig.sessions.cancel(bytes([number]) * 16)
    await worker.stream_over.wait()
    rig.fleet._cancelled.clear()
    await rig.until(lambda: rig.fleet.verifiers.get("v") not in (None, held))


async def test_what_many_sessions_are_told_in_a_turn_of_the_loop_is_few_messages(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a turn had what a busy router says wait for seconds, and the worker given up for it."""
    messages = list[int]()

    async def counted(commands: Any) -> Any:
        async for command in commands:
            messages.append(1 + len(command.further))
            yield command

    monkeypatch.setattr("router.workers.together", lambda outbox: counted(together(outbox)))
    worker = await rig.verifier("v")
    for number in range(200):
        await rig.sessions.cancel(bytes([number]) * 16)
    assert [(await worker.next_command("cancel")).session_id[0] for _ in range(200)] == list(range(200))
    assert sum(messages) == 201 and len(messages) < 20, "its hello, too"


class Relay:
    """A link that can be cut: what is sent then stays under way until it is mended, as TCP has it."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._tasks: set[asyncio.Task[None]] = set()
        self.whole = asyncio.Event()
        self.whole.set()

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return "127.0.0.1:{1}".format(*self._server.sockets[0].getsockname())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(self._host, int(self._port))
        for pump in (self._pump(reader, there_writer), self._pump(there_reader, writer)):
            self._tasks.add(asyncio.create_task(pump))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                await self.whole.wait()
                writer.write(data)
        await self.whole.wait()
        writer.close()

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def test_a_cut_link_is_silence_and_a_mended_one_brings_the_worker_back(rig: Any) -> None:
    behind = await rig.worker(Role.VERIFIER, "v")
    relay = Relay(behind.address)
    behind.address = await relay.start()
    behind.register(rig.address)
    await rig.until(lambda: "v" in rig.fleet.verifiers)
    other, held = await rig.drafter("d"), rig.fleet.verifiers["v"]
    running = Running(rig, request())
    opened = await behind.next_command("open")
    relay.whole.clear()
    await rig.until(lambda: "v" not in rig.fleet.verifiers)
    assert held.placed == 0 and "d" in rig.fleet.drafters and not other.stream_over.is_set()
    relay.whole.set()
    again = await behind.next_command("open")
    assert again.session_id == opened.session_id
    running.task.cancel()
    await relay.stop()


async def test_a_silent_drafters_sessions_get_another_one(rig: Any) -> None:
    verifier, silent = await rig.verifier(), await rig.drafter("d1")
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    first = await silent.next_command("open")
    other = await rig.drafter("d2")
    verifier.say(**committed(opened.session_id, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    silent.beats = False
    second = await other.next_command("open")
    assert (second.session_id, list(second.output)) == (first.session_id, [10])
    assert not verifier.stream_over.is_set() and verifier.commands.empty()
    running.task.cancel()


async def test_one_that_speaks_of_its_own_sessions_only_is_not_silent(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.workers.IDLE_SILENCE_SECONDS", SILENCE_SECONDS)
    worker, silent = await rig.verifier("v1"), await rig.verifier("v2")
    held = rig.fleet.verifiers["v1"]
    worker.beats = silent.beats = False
    while not silent.stream_over.is_set():
        worker.say(committed=[])
        await asyncio.sleep(0.1)
    assert rig.fleet.verifiers["v1"] is held and not worker.stream_over.is_set()


async def test_the_end_of_an_opening_does_not_end_the_one_after_it(rig: Any) -> None:
    """A drafter's own word that crosses a move must not cost the session its drafter."""
    first, drafter = await rig.verifier("v1"), await rig.drafter("d")
    running = Running(rig, request())
    opened = await first.next_command("open")
    draft = await drafter.next_command("open")
    second = await rig.verifier("v2")
    await first.stop()
    await second.next_command("open")
    await drafter.next_command("close")
    again = await drafter.next_command("open")
    assert again.opening != draft.opening
    held = rig.fleet.drafters["d"]
    for opening, placed in ((draft.opening, 1), (again.opening, 0)):
        ended = drafter_pb2.DraftEnded(
            session_id=opened.session_id, opening=opening, reason="no such session"
        )
        drafter.say(ended=[ended], load=drafter_pb2.DrafterLoad(sessions=placed + 7))
        await rig.until(lambda placed=placed: held.load.sessions == placed + 7)
        assert held.placed == placed
    running.task.cancel()


async def test_nobody_follows_a_drafter_whose_session_its_verifier_has_no_more(rig: Any) -> None:
    """As a rule it has ended, of which the drafter hears first. If it has not, another one drafts soon."""
    verifier, drafter, other = await rig.verifier(), await rig.drafter("d1"), await rig.drafter("d2")
    running = Running(rig, request(max_tokens=32))
    sid = (await verifier.next_command("open")).session_id
    await rig.until(lambda: not (drafter.commands.empty() and other.commands.empty()))
    if drafter.commands.empty():
        drafter, other = other, drafter
    for turn, worker in enumerate((drafter, other)):
        draft, held = await worker.next_command("open"), rig.fleet.drafters[worker.worker_id]
        verifier.say(**committed(sid, 3 + 16 * turn, 10))
        await rig.until(lambda turn=turn: len(running.events) == 2 * turn + 1)
        revoked = {"cause": drafter_pb2.DRAFT_END_CAUSE_REVOKED, "reason": "the verifier has no such session"}
        worker.say(ended=[drafter_pb2.DraftEnded(session_id=sid, opening=draft.opening, **revoked)])
        await rig.until(lambda held=held: held.placed == 0)
        waiting = asyncio.Event()
        rig.fleet.turns.soon(waiting.set)
        await waiting.wait()
        assert other.commands.empty() and drafter.commands.empty()
        verifier.say(**committed(sid, 4 + 16 * turn, *[10] * 15))  # after the last of them no look is due
    verifier.say(**finished(sid, verifier_pb2.FINISH_REASON_LENGTH))
    assert len(await running.task) == 5
    assert other.commands.empty() and drafter.commands.empty()


async def test_a_verifier_that_joins_hears_what_was_cancelled_before(rig: Any) -> None:
    there = await rig.verifier("v1")
    await rig.sessions.cancel(b"x" * 16)
    assert (await there.next_command("cancel")).session_id == b"x" * 16
    late = await rig.verifier("v2")
    assert (await late.next_command("cancel")).session_id == b"x" * 16


async def test_verifiers_hear_once_a_second_that_a_session_is_cancelled_and_never_of_one_that_is_over(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = await rig.verifier("v")
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    verifier.say(**committed(opened.session_id, 3, 3), **finished(opened.session_id))
    await running.task
    now = 1.0  # as the rig has it
    monkeypatch.setattr(rig.fleet, "_clock", lambda: now)

    async def cancelled(session_id: bytes) -> list[bytes]:
        for _ in range(100):
            await rig.sessions.cancel(session_id)
        await rig.sessions.cancel(b"z" * 16)  # what comes last
        heard: list[bytes] = []
        while not heard or heard[-1] != b"z" * 16:
            heard.append((await verifier.next_command("cancel")).session_id)
        return heard[:-1]

    for flushed in (False, True):
        if flushed:
            await rig.sessions._log_writer.flush()
        assert await cancelled(opened.session_id) == []
        now += 1.0
    assert await cancelled(b"x" * 16) == [b"x" * 16]
    now += 1.0
    assert await cancelled(b"x" * 16) == [b"x" * 16]


async def test_the_least_recent_cancellations_are_forgotten(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.fleet.MOST_CANCELLED", 2)
    now = 1.0  # as the rig has it
    monkeypatch.setattr(rig.fleet, "_clock", lambda: now)
    for name in (b"a", b"b", b"c", b"b", b"d"):
        await rig.sessions.cancel(name * 16)
        now += 1.0
    late = await rig.verifier("v1")
    heard = [(await late.next_command("cancel")).session_id[:1] for _ in range(2)]
    assert heard == [b"b", b"d"]
    now += 61.0
    later = await rig.verifier("v2")
    running = Running(rig, request())
    await rig.until(lambda: not (late.commands.empty() and later.commands.empty()))
    kinds = [
        worker.commands.get_nowait().WhichOneof("command")
        for worker in (late, later)
        if not worker.commands.empty()
    ]
    assert kinds == ["open"]  # the cancellations are older than any wait for a verifier
    running.task.cancel()


def give_back(worker: Any, session_id: bytes, draining: bool) -> None:
    failed = verifier_pb2.Failed(session_id=session_id, code=14, message="no")
    worker.say(failed=[failed], load=verifier_pb2.VerifierLoad(draining=draining))


async def test_what_verifiers_that_leave_give_back_does_not_count_as_lost(rig: Any) -> None:
    worker = await rig.verifier("v")
    running = Running(rig, request())
    for turn in range(MAX_LOSSES + 2):
        opened = await worker.next_command("open")
        give_back(worker, opened.session_id, draining=True)
        worker = await rig.verifier(f"v{turn}")
    opened = await worker.next_command("open")
    worker.say(**committed(opened.session_id, 3, 1, 2, 3), **finished(opened.session_id))
    assert len(await running.task) == 2


async def test_a_request_that_verifiers_die_of_ends(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.losses.APART_SECONDS", 0.0)
    worker = await rig.verifier("v")
    running = Running(rig, request())
    for turn in range(MAX_LOSSES):
        await worker.next_command("open")
        await worker.stop()
        worker = await rig.verifier(f"v{turn}")
    await worker.next_command("open")
    await worker.stop()
    with pytest.raises(Unavailable, match=f"{MAX_LOSSES + 1} target workers in a row"):
        await running.task


async def test_a_request_outlives_many_verifiers_that_are_lost_at_once(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = 0.2
    monkeypatch.setattr("router.losses.APART_SECONDS", apart)
    workers = [await rig.verifier(f"v{number}") for number in range(MAX_LOSSES + 3)]
    running = Running(rig, request())
    await workers[0].next_command("open")
    for worker in workers[:-1]:
        rig.fleet.remove(rig.fleet.verifiers[worker.worker_id])
    assert workers[-1].commands.empty()
    opened = await workers[-1].next_command("open")
    workers[-1].say(**committed(opened.session_id, 3, 1, 2, 3), **finished(opened.session_id))
    assert len(await running.task) == 2
