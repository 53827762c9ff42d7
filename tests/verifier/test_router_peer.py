"""What a router is told, and when."""

from dataclasses import replace

from outrider.net.heartbeat import IDLE_HEARTBEATS
from outrider.sampling.params import SamplingParams
from outrider.wire.guesses import Guess
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.logprobs import Logprob
from outrider.wire.session import SessionParams
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
    running.logprobs += [Logprob(-1.0), Logprob(-2.0)]
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
