"""What a router is told, and when."""

from dataclasses import replace

from outrider.net.heartbeat import IDLE_HEARTBEATS
from outrider.sampling.params import SamplingParams
from outrider.wire.guesses import Guess
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.logprobs import MAX_TOP_LOGPROBS, Logprob
from outrider.wire.session import FinishReason, SessionParams
from outrider.wire.verifier_sessions import EVENTS
from verifier.router_peer import RouterPeer
from verifier.running import Running
from verifier.session import Outcome, Session, SessionSpec

LOAD = VerifierLoad(running=3, kv_usage=0.5)


async def heard(peer: RouterPeer) -> bool:
    """Takes what there is to be sent."""
    if not peer._ready.is_set():
        return False
    await anext(peer.events())
    return True


async def test_who_has_a_session_here_hears_every_beat_and_others_hear_one_of_a_few() -> None:
    concerned, other = RouterPeer(LOAD), RouterPeer(LOAD)
    counts = [0, 0]
    for _ in range(5 * IDLE_HEARTBEATS):
        concerned.beat(LOAD, True)
        other.beat(LOAD, False)
        counts = [counts[0] + await heard(concerned), counts[1] + await heard(other)]
    assert counts == [5 * IDLE_HEARTBEATS, 5]


async def test_news_is_told_to_all() -> None:
    peer = RouterPeer(LOAD)
    for changed in (
        {"running": 4},
        {"running": 4, "kv_usage": 0.7},
        {"running": 4, "kv_usage": 0.7, "price": 0.2},
        {"running": 4, "kv_usage": 0.7, "price": 0.2, "draining": True},
    ):
        for told in (True, False):
            peer.beat(replace(LOAD, **changed), False)
            assert await heard(peer) is told
    peer.beat(replace(LOAD, **changed, step_seconds=9.0), False)
    assert not await heard(peer)
    peer.dropped({"late": 1})
    peer.beat(replace(LOAD, **changed), False)
    assert await heard(peer)


def test_what_is_news_of_a_drafter() -> None:
    told = DrafterLoad(sessions=2, token_seconds=0.01)
    assert not told.is_news(told) and not replace(told, token_seconds=0.0105, busy=0.9).is_news(told)
    for changed in ({"sessions": 3}, {"token_seconds": 0.02}, {"round_trips": {"v": 1.0}}):
        assert replace(told, **changed).is_news(told)


async def test_a_router_that_takes_a_session_over_hears_the_log_probabilities_that_it_missed() -> None:
    params = SessionParams((1, 2), SamplingParams(), 9, logprobs=0)
    running = Running(Session(SessionSpec(bytes(16), params, (3,), 199, b""), 4), None)
    running.session.log += [5, 6]
    running.logprobs.extend((Logprob(-1.0), Logprob(-2.0)))
    peer = RouterPeer(LOAD)
    running.adopted(SessionSpec(bytes(16), params, (3, 5), 199, b""))
    peer.adopted(running, 1, None)
    (missed,) = (await anext(peer.events())).committed
    assert (list(missed.tokens), missed.logprobs) == ([6], (Logprob(-2.0),))


async def test_a_router_that_takes_a_session_over_hears_each_step_that_it_missed_with_its_guesses() -> None:
    params = SessionParams((1, 2), SamplingParams(), 9, guesses=True)
    running = Running(Session(SessionSpec(bytes(16), params, (), 199, b""), 4), None)
    for base, tokens in ((2, (3,)), (3, (5, 6)), (5, (7,))):
        guesses = (Guess(5, 0.5, "d"),) if base == 3 else ()
        running.told.append(Outcome(base, tokens, len(guesses), len(guesses), None, guesses=guesses))
        running.session.log += tokens
    peer = RouterPeer(LOAD)
    running.adopted(SessionSpec(bytes(16), params, (3,), 199, b""))
    peer.adopted(running, 1, None)
    first, second = (await anext(peer.events())).committed
    assert (first.base, first.tokens, first.accepted, first.guesses) == (3, (5, 6), 1, (Guess(5, 0.5, "d"),))
    assert (second.base, second.tokens, second.guesses) == (5, (7,), ())


def test_who_knows_less_than_the_log_probabilities_here_begin_with_gets_a_session_of_its_own() -> None:
    """The tokens before were committed at another verifier, and this one knows no log-probabilities of them:
    what it told would be taken for a lie."""
    params = SessionParams((1, 2), SamplingParams(), 9, logprobs=0)
    running = Running(Session(SessionSpec(bytes(16), params, (3, 4), 199, b""), 4), None)
    running.session.log += [5, 6]
    running.logprobs.extend((Logprob(-1.0), Logprob(-2.0)))
    for output, continues in (((3, 4, 5), True), ((3, 4), True), ((3,), False), ((), False)):
        assert running.continues(SessionSpec(bytes(16), params, output, 199, b"")) is continues
    running.told = [Outcome(4, (5,), 0, 0, None), Outcome(5, (6,), 0, 0, None)]
    guessed = replace(params, logprobs=None, guesses=True)
    running.session.spec = SessionSpec(bytes(16), guessed, (3, 4), 199, b"")
    for output, continues in (((3, 4, 5), True), ((3, 4), True), ((3,), False), ((), False)):
        assert running.continues(SessionSpec(bytes(16), guessed, output, 199, b"")) is continues
    plain = replace(params, logprobs=None)
    running.session.spec = SessionSpec(bytes(16), plain, (3, 4), 199, b"")
    assert running.continues(SessionSpec(bytes(16), plain, (3,), 199, b""))


async def test_what_does_not_fit_into_a_message_comes_in_several() -> None:
    count = 100_000  # with their likeliest tokens: some 18 MB, where a message may have 16 MiB
    one = Logprob(-1.0, tuple((2**31, -1.0) for _ in range(MAX_TOP_LOGPROBS)))
    params = SessionParams((1, 2), SamplingParams(), count, logprobs=MAX_TOP_LOGPROBS)
    running = Running(Session(SessionSpec(bytes(16), params, (), 199, b""), 4), None)
    running.session.log += list(range(count))
    running.logprobs.extend((one,) * count)
    peer = RouterPeer(LOAD)
    peer.adopted(running, 1, FinishReason.LENGTH)
    tokens: list[int] = []
    scored = 0
    async for events in peer.events():
        assert len(EVENTS.to_bytes(events)) <= EVENTS.max_bytes
        for step in events.committed:
            assert step.base == 2 + len(tokens) and len(step.logprobs) == len(step.tokens)
            tokens += step.tokens
            scored += len(step.logprobs)
        if events.finished:
            break
    assert tokens == list(range(count)) and scored == count
