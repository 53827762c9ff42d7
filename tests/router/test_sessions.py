"""Sessions on scripted workers, over real loopback gRPC: what is sent, what is yielded, what is freed."""

import asyncio
from typing import Any

import pytest

from outrider.errors import InvalidRequest, OutriderError, Overloaded, Unavailable, UnknownModel
from outrider.net.draft_right import right
from outrider.net.outbox import Outbox
from outrider.v1 import drafter_pb2, verifier_pb2
from outrider.wire.codec import sampling_from_wire
from outrider.wire.session import FinishReason
from router import losses
from router import session_log_writer as log_writer_module
from router.requests import SessionBegun, SessionEnded, TokensCommitted
from tests.router.asking import PROMPT, SAMPLING, Running, committed, finished, first_step, request


async def test_a_session_is_opened_on_both_workers_with_all_that_they_need(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    drafted = await drafter.next_command("open")
    assert len(opened.session_id) == len(opened.draft_key) == 16
    assert (drafted.session_id, drafted.draft_key) == (opened.session_id, right(opened.draft_key, 0))
    for message in (opened, drafted):
        assert tuple(message.params.prompt) == PROMPT
        assert list(message.output) == []
        assert message.params.max_tokens == 50
        assert sampling_from_wire(message.params.sampling) == SAMPLING
    assert list(opened.params.stop_token_ids) == [0, 3]
    assert opened.num_speculative_tokens == 8
    assert drafted.verifier_address == verifier.address
    assert drafted.window == 18  # two steps of k + 1: nothing is measured yet
    assert drafted.target_vocab_size == 100
    running.task.cancel()


async def test_its_client_hears_nothing_before_another_router_could_go_on_with_it(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_writer_module, "BEGUN_SECONDS", 1000.0)
    written, append = asyncio.Event(), rig.store.logs.append

    async def held(*appends: Any) -> Any:
        await written.wait()
        return await append(*appends)

    monkeypatch.setattr(rig.store.logs, "append", held)
    verifier = await rig.verifier()
    events = rig.sessions.run(request())
    begun = asyncio.create_task(anext(events))
    opened = await verifier.next_command("open")  # its prompt is read meanwhile
    verifier.say(**committed(opened.session_id, 3, 10))
    await rig.until(lambda: rig.sessions._open[opened.session_id].transcript.steps == 1)
    assert not begun.done() and await rig.store.logs.read(opened.session_id) is None
    written.set()
    assert await begun == SessionBegun()
    assert await rig.store.logs.read(opened.session_id) is not None
    assert await anext(events) == TokensCommitted((10,), 0, 0)
    await events.aclose()


async def test_what_a_client_gets_and_that_a_finished_session_is_closed_at_the_drafter_only(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    await drafter.next_command("open")
    verifier.say(**committed(opened.session_id, 3, 10, cached=2))
    verifier.say(**committed(opened.session_id, 4, 11, 12, 13, accepted=2, verified=4))
    verifier.say(
        **committed(opened.session_id, 7, 3, accepted=0, verified=8),
        **finished(opened.session_id, verifier_pb2.FINISH_REASON_STOP),
    )
    assert await running.task == [
        TokensCommitted((10,), 0, 0, cached_prompt_tokens=2),
        TokensCommitted((11, 12, 13), 2, 4),
        TokensCommitted((3,), 0, 8),
        SessionEnded(FinishReason.STOP),
    ]
    closed = await drafter.next_command("close")
    assert closed.session_id == opened.session_id
    # The next command that the verifier gets is the next session's: it needs no close for this one.
    second = Running(rig, request(stop_token_ids=()))
    reopened = await verifier.next_command("open")
    assert list(reopened.params.stop_token_ids) == []
    assert reopened.session_id != opened.session_id
    second.task.cancel()


async def test_cancelling_closes_the_session_on_both_workers(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    await drafter.next_command("open")
    verifier.say(**committed(opened.session_id, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    running.task.cancel()
    assert (await verifier.next_command("close")).session_id == opened.session_id
    assert (await drafter.next_command("close")).session_id == opened.session_id
    # What the verifier still says about it is ignored.
    verifier.say(**committed(opened.session_id, 99, 3), **finished(opened.session_id))
    other = Running(rig, request())
    opened = await verifier.next_command("open")
    verifier.say(**committed(opened.session_id, 3, 3), **finished(opened.session_id))
    assert len(await other.task) == 2


async def test_closing_the_generator_closes_the_session_on_both_workers(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    events = rig.sessions.run(request())
    first = asyncio.create_task(first_step(events))
    opened = await verifier.next_command("open")
    await drafter.next_command("open")
    verifier.say(**committed(opened.session_id, 3, 10))
    assert await first == TokensCommitted((10,), 0, 0)
    await events.aclose()
    assert (await verifier.next_command("close")).session_id == opened.session_id
    assert (await drafter.next_command("close")).session_id == opened.session_id


async def test_repeated_tokens_are_dropped(rig: Any) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request())
    sid = (await verifier.next_command("open")).session_id
    verifier.say(**committed(sid, 3, 10, 11, accepted=1, verified=2))
    verifier.say(**committed(sid, 3, 10, 11, accepted=1, verified=2))
    verifier.say(**committed(sid, 4, 11, 12, 3, accepted=2, verified=4))
    verifier.say(**committed(sid, 2, 7, 10), **finished(sid))
    assert await running.task == [
        TokensCommitted((10, 11), 1, 2),
        TokensCommitted((12, 3), 1, 3),
        SessionEnded(FinishReason.STOP),
    ]


@pytest.mark.parametrize(
    ("base", "tokens", "accepted", "verified"),
    [
        (5, (12,), 0, 0),  # a gap: position 4 is next
        (3, (99, 12), 0, 0),  # position 3 was something else
        (4, (11,), 2, 2),  # more accepted than committed
        (4, (11, 12), 1, 0),  # accepted though nothing was verified
    ],
)
async def test_an_account_that_does_not_continue_the_log_ends_the_session_on_both_workers(
    rig: Any, base: int, tokens: tuple[int, ...], accepted: int, verified: int
) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request())
    sid = (await verifier.next_command("open")).session_id
    await drafter.next_command("open")
    verifier.say(**committed(sid, 3, 10))
    verifier.say(**committed(sid, base, *tokens, accepted=accepted, verified=verified))
    with pytest.raises(OutriderError, match="lost track of this request"):
        await running.task
    assert running.events == [TokensCommitted((10,), 0, 0)]
    assert (await verifier.next_command("close")).session_id == sid
    assert (await drafter.next_command("close")).session_id == sid


async def test_a_lost_drafter_is_replaced_by_another_that_gets_prompt_and_output(rig: Any) -> None:
    verifier, first = await rig.verifier(), await rig.drafter("d1")
    second = await rig.drafter("d2")
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    await first.next_command("open")
    verifier.say(**committed(opened.session_id, 3, 10, 11, accepted=1, verified=1))
    await rig.until(lambda: len(running.events) == 1)
    await first.stop()
    reopened = await second.next_command("open")
    assert reopened.session_id == opened.session_id
    assert reopened.draft_key == right(opened.draft_key, 1)
    assert tuple(reopened.params.prompt) == PROMPT
    assert list(reopened.output) == [10, 11]
    verifier.say(**committed(opened.session_id, 5, 3), **finished(opened.session_id))
    assert len(await running.task) == 3
    assert (await second.next_command("close")).session_id == opened.session_id


async def test_without_another_drafter_the_session_goes_on_plainly_until_one_joins(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter("d")
    running = Running(rig, request())
    opened = await verifier.next_command("open")
    await drafter.next_command("open")
    await drafter.stop()
    await rig.until(lambda: not rig.fleet.drafters)
    verifier.say(**committed(opened.session_id, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    again = await rig.drafter("d", incarnation=2)
    reopened = await again.next_command("open")
    assert (reopened.session_id, list(reopened.output)) == (opened.session_id, [10])
    running.task.cancel()


async def test_a_drafter_that_gives_a_session_up_does_not_get_it_again(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter("d1")
    running = Running(rig, request())
    sid = (await verifier.next_command("open")).session_id
    draft = await drafter.next_command("open")
    drafter.say(ended=[drafter_pb2.DraftEnded(session_id=sid, opening=draft.opening, reason="no room")])
    await rig.until(lambda: rig.fleet.drafters["d1"].placed == 0)
    other = await rig.drafter("d2")
    assert (await other.next_command("open")).session_id == sid
    assert drafter.commands.empty()
    # A new session may go there again.
    second = Running(rig, request())
    assert (await drafter.next_command("open")).session_id != sid
    running.task.cancel()
    second.task.cancel()


async def test_a_drafter_that_does_not_reach_a_verifier_is_told_and_others_come_first_there(
    rig: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await rig.verifier("v")
    drafter = await rig.drafter("a")
    running = [Running(rig, request())]

    async def give_up(cause: int) -> None:
        draft = await drafter.next_command("open")
        ended = {"session_id": draft.session_id, "opening": draft.opening, "cause": cause, "reason": "a wall"}
        drafter.say(ended=[drafter_pb2.DraftEnded(**ended)])
        await rig.until(lambda: rig.fleet.drafters["a"].placed == 0)

    await give_up(drafter_pb2.DRAFT_END_CAUSE_UNFIT)
    assert rig.sessions.degraded() == ""
    running.append(Running(rig, request()))
    await give_up(drafter_pb2.DRAFT_END_CAUSE_UNREACHED)
    assert rig.sessions.degraded() == "drafter a does not draft for verifier v"
    assert "drafter a does not draft for verifier v: a wall" in caplog.text
    running.append(Running(rig, request()))
    await give_up(99)  # of a newer drafter; it is alone, so it was asked again
    assert caplog.text.count("does not draft") == 1
    counted = rig.metrics.exposition().decode()
    for cause in ("unfit", "unreached", "unspecified"):
        assert f'outrider_drafts_ended_total{{cause="{cause}"}} 1.0' in counted
    other = await rig.drafter("b")
    for _ in running:
        await other.next_command("open")
    running.append(Running(rig, request()))
    await other.next_command("open")
    assert drafter.commands.empty()
    for one in running:
        one.task.cancel()


async def test_a_lost_verifier_frees_the_drafter_and_is_told_to_the_client_where_no_other_comes(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "RESUME_SECONDS", 0.2)
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request())
    sid = (await verifier.next_command("open")).session_id
    await drafter.next_command("open")
    verifier.say(**committed(sid, 3, 10))
    await rig.until(lambda: len(running.events) == 1)
    await verifier.stop()
    assert (await drafter.next_command("close")).session_id == sid
    with pytest.raises(Unavailable, match="was lost"):
        await running.task


async def test_a_verifiers_refusal_reaches_the_client_as_what_it_is(rig: Any) -> None:
    verifier = await rig.verifier()
    running = Running(rig, request())
    sid = (await verifier.next_command("open")).session_id
    verifier.say(failed=[verifier_pb2.Failed(session_id=sid, code=3, message="the prompt is too long")])
    with pytest.raises(InvalidRequest, match="the prompt is too long"):
        await running.task
    assert verifier.commands.empty()


async def test_speculation_switched_off_needs_no_drafter_and_no_key(rig: Any) -> None:
    verifier, drafter = await rig.verifier(), await rig.drafter()
    running = Running(rig, request(num_speculative_tokens=0))
    opened = await verifier.next_command("open")
    assert (opened.num_speculative_tokens, opened.draft_key) == (0, b"")
    assert rig.fleet.drafters["d"].placed == 0
    assert drafter.commands.empty()
    running.task.cancel()


async def test_sessions_spread_over_the_verifiers_of_their_model(rig: Any) -> None:
    one, other, alien = await rig.verifier("v1"), await rig.verifier("v2"), await rig.verifier("a", model="n")
    running = [Running(rig, request()) for _ in range(4)]
    for worker in (one, other):
        await worker.next_command("open")
        await worker.next_command("open")
    assert alien.commands.empty()
    for session in running:
        session.task.cancel()


async def test_more_sessions_than_allowed_are_refused_and_admitted_again_later(rig: Any) -> None:
    verifier = await rig.verifier()
    running = [Running(rig, request()) for _ in range(4)]
    for _ in running:
        await verifier.next_command("open")
    with pytest.raises(Overloaded, match="4 answers are in progress"):
        await Running(rig, request()).task
    running[0].task.cancel()
    await verifier.next_command("close")
    fifth = Running(rig, request())
    await verifier.next_command("open")
    for session in [*running, fifth]:
        session.task.cancel()


async def test_models_are_found_by_name(rig: Any) -> None:
    with pytest.raises(Unavailable, match="no target worker is registered"):
        rig.sessions.model("m")
    await rig.verifier("v1", model="b")
    await rig.verifier("v2", model="a")
    assert [model.name for model in rig.sessions.models()] == ["a", "b"]
    assert rig.sessions.model("").name == "a"
    assert rig.sessions.model("b").name == "b"
    with pytest.raises(UnknownModel, match="the model 'c' is not served here; there is 'a', 'b'"):
        rig.sessions.model("c")
    with pytest.raises(UnknownModel):
        await Running(rig, request(model="c")).task


async def test_the_stream_to_a_worker_that_leaves_is_closed_there(rig: Any) -> None:
    worker = await rig.verifier()
    worker.registration.cancel()
    await worker.stream_over.wait()


async def test_a_worker_that_reads_no_commands_is_dropped_and_its_sessions_go_on_elsewhere(rig: Any) -> None:
    await rig.verifier("v1")
    other = await rig.verifier("v2")
    held = rig.fleet.verifiers["v1"]
    full: Outbox[Any] = Outbox(limit=0)
    held._outbox = full
    running = Running(rig, request())
    opened = await other.next_command("open")
    assert tuple(opened.params.prompt) == PROMPT
    running.task.cancel()
