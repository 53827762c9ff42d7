"""The formula against a simulation of the same machines, event by event, and against what is known."""

from __future__ import annotations

import heapq
import random
import re
from itertools import count
from pathlib import Path

import pytest

from outrider.errors import StartupError
from outrider_cli.speedup import Pair, expect
from router.speculation import window
from verifier.step_start import Awaited, start_at

TOKENS = 8_000


class Simulation:
    """Verifier and drafters as processes with messages under way, and texts with right and wrong guesses.

    A step takes all sessions. Where there is one, the verifier's own rule says when it begins. Each session
    has a drafter of its own. A draft counts while no wrong guess was corrected since it was begun: that is
    what comparing tokens comes to.
    """

    def __init__(self, pair: Pair, k: int, seed: int) -> None:
        self.pair, self.k = pair, k
        self.draw = random.Random(seed)
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.order = count()
        n = pair.sessions
        self.right: list[list[bool]] = [[] for _ in range(n)]
        self.log = [0] * n  # committed tokens
        self.arrived = [0] * n  # positions before this one are guessed, on the path of the newest draft
        self.path = [0] * n  # where that path began: a guess from before a correction is dropped
        self.known = [0] * n  # what the drafter knows to be committed
        self.drafted = [0] * n
        self.restarts = [0] * n
        self.drafting = [False] * n
        self.busy = 0.0
        seconds = (pair.target_step_ms / 1000, pair.rtt_ms / 1000, pair.guess_ms / 1000)
        self.window = window(k, *seconds)
        self.planned = [0] * n
        self.waiting: Awaited | None = None  # the one session, where the verifier waits for its drafts
        self.free_since = 0.0
        self.last_at = 0.0  # of the newest draft, where there is one session

    def run(self) -> tuple[float, float]:
        """Tokens a millisecond of one session, and the busy share of its drafter."""
        for session in range(self.pair.sessions):
            self._draft(session, 0.0)
        self._on_ready(0.0)
        now = 0.0
        while min(self.log) < TOKENS:
            now, _, what, payload = heapq.heappop(self.events)
            getattr(self, "_on_" + what)(now, *payload)
        n = self.pair.sessions
        return sum(self.log) / n / now, self.busy / n / now

    def _at(self, time: float, what: str, *payload: int) -> None:
        heapq.heappush(self.events, (time, next(self.order), what, payload))

    def _is_right(self, session: int, position: int) -> bool:
        while len(self.right[session]) <= position:
            self.right[session].append(self.draw.random() < self.pair.acceptance)
        return self.right[session][position]

    def _on_ready(self, now: float) -> None:
        """The verifier has nothing to do: it starts a step, or waits for drafts."""
        self.free_since = now
        if self.pair.sessions == 1:
            lead = self.pair.rtt_ms + self.pair.guess_ms
            ahead = max(0, self.arrived[0] - self.log[0])
            self.waiting = self._awaited(now, self.last_at if ahead else None, ahead, lead)
        self._ask(now)

    def _awaited(self, committed_at: float, last_at: float | None, ahead: int, lead: float) -> Awaited:
        token, acceptance = self.pair.guess_ms, self.pair.acceptance
        survival = acceptance**ahead
        return Awaited(committed_at, last_at, ahead, self.k, acceptance, lead, token, survival)

    def _ask(self, now: float) -> None:
        step, goodput = self.pair.target_step_ms, self.log[0] / now if now else 0.0
        price = goodput * self.pair.target_token_ms
        start = start_at(now, self.free_since, step, goodput, [self.waiting], price) if self.waiting else now
        if start > now:
            self._at(start, "waited")
        else:
            self._step(now)

    def _on_waited(self, now: float) -> None:
        if self.waiting is not None:
            self._ask(now)

    def _step(self, now: float) -> None:
        self.waiting = None
        self.planned = [
            max(0, min(self.k, arrived - log)) for arrived, log in zip(self.arrived, self.log, strict=True)
        ]
        added = self.pair.target_token_ms * sum(self.planned)
        self._at(now + self.pair.target_step_ms + added, "step_end")

    def _on_step_end(self, now: float) -> None:
        for session, planned in enumerate(self.planned):
            first = self.log[session]
            accepted = 0
            while accepted < planned and self._is_right(session, first + accepted):
                accepted += 1
            self.log[session] = first + accepted + 1
            wrong = not self._is_right(
                session, first + accepted
            )  # what was or will be drafted for the last one
            if wrong:
                self.arrived[session] = self.log[session]
                self.path[session] += 1
            self._at(now + self.pair.rtt_ms / 2, "commit", session, self.log[session], wrong)
        self._on_ready(now)

    def _on_commit(self, now: float, session: int, log: int, wrong: int) -> None:
        self.known[session] = log
        if wrong:
            self.drafted[session] = log
            self.restarts[session] += 1
            self.drafting[session] = False  # the token in the making is dropped
        self._draft(session, now)

    def _draft(self, session: int, now: float) -> None:
        if not self.drafting[session] and self.drafted[session] < self.known[session] + self.window:
            self.drafting[session] = True
            self._at(now + self.pair.guess_ms, "drafted", session, self.restarts[session])

    def _on_drafted(self, now: float, session: int, restart: int) -> None:
        if restart != self.restarts[session]:
            return
        self.busy += self.pair.guess_ms
        self.drafted[session] += 1
        self.drafting[session] = False
        self._at(now + self.pair.rtt_ms / 2, "draft", session, self.drafted[session], restart)
        self._draft(session, now)

    def _on_draft(self, now: float, session: int, upto: int, restart: int) -> None:
        if restart == self.path[session]:
            self.arrived[session] = upto
            self.last_at = now
            if self.waiting is not None and upto > self.log[0]:
                committed_at, lead = self.free_since, self.waiting.lead
                assert lead is not None
                self.waiting = self._awaited(committed_at, now, upto - self.log[0], lead)
                self._ask(now)


PAIRS = {
    "70B and 1B, near": Pair(13, 0.8, 1, 1.5, sessions=4),
    "70B and 1B, far": Pair(13, 0.8, 20.3, 1.5, sessions=4),  # times at which nothing meets by chance
    "8B and .5B, far": Pair(4.5, 0.9, 20, 0.8, sessions=4),
    "on CPUs, dear tokens": Pair(82, 0.8, 1, 1.5, target_token_ms=0.6, sessions=4),
    "a poor draft": Pair(13, 0.3, 5, 1.5, sessions=4),
    "look-up": Pair(13, 0.6, 20, propose="suffix", sessions=4),
    "a slow draft": Pair(10, 0.7, 3, 4, sessions=4),
    "one session, near": Pair(82, 0.8, 1, 1.5),
    "one session, far": Pair(82, 0.8, 20.3, 1.5),
    "one session, look-up": Pair(13, 0.6, 1, 0.02),
}


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize("name", PAIRS)
def test_the_formula_is_what_a_simulation_finds(name: str, k: int) -> None:
    pair = PAIRS[name]
    rate, busy = Simulation(pair, k, seed=7).run()
    found = expect(pair, k)
    assert found.speedup == pytest.approx(rate * pair.target_step_ms, rel=0.03)
    assert found.drafter_share == pytest.approx(busy, rel=0.1, abs=0.03)
    assert found.drafters == pytest.approx(pair.sessions * found.drafter_share)


def test_with_all_drafts_there_it_is_the_known_formula() -> None:
    """A drafter that costs no time, next door: (1 - a^(k+1)) / (1 - a) tokens a step."""
    found = expect(Pair(1000, 0.999, 0, 0.001, sessions=2), 4)
    assert found.tokens_per_step == pytest.approx(sum(0.999**j for j in range(5)), rel=0.01)
    assert found.tokens_per_step == pytest.approx(found.speedup)


def test_one_session_waits_where_it_pays() -> None:
    """A long step and a near drafter: without waiting, each wrong guess costs a step for one token."""
    alone, several = (expect(Pair(82, 0.8, 1, 1.5, sessions=n), 8) for n in (1, 2))
    assert alone.speedup > 1.2 * several.speedup
    far = [expect(Pair(13, 0.8, 20, 1.5, sessions=n), 8).speedup for n in (1, 2)]
    assert far[0] == pytest.approx(far[1], rel=0.03), "waiting gains little where drafts come from afar"


def test_what_must_hold_for_any_pair() -> None:
    draw = random.Random(3)
    for _ in range(60):
        step, token, rtt = draw.uniform(1, 50), draw.uniform(0.05, 20), draw.uniform(0, 50)
        low, high = sorted(draw.uniform(0, 0.95) for _ in range(2))
        k = draw.randint(1, 12)
        found = [expect(Pair(step, a, rtt, token, sessions=3), k) for a in (low, high)]
        assert 1 - 1e-9 <= found[0].speedup <= found[1].speedup + 1e-9 <= k + 1 + 1e-9
        assert all(0 <= each.drafter_share <= 1 for each in found)
        farther = expect(Pair(step, high, rtt + 10, token, sessions=3), k)
        assert farther.speedup <= found[1].speedup + 1e-9


def test_without_drafts_it_is_plain_decoding() -> None:
    assert expect(Pair(13, 0.8, 1, 1.5), 0).speedup == 1
    assert expect(Pair(13, 0.8, 1, 1.5), 0).drafters == 0
    assert expect(Pair(13, 0, 1, 1.5, sessions=2), 8).speedup == pytest.approx(1)


def test_dear_draft_tokens_may_cost_more_than_they_gain() -> None:
    assert expect(Pair(13, 0.1, 1, 1.5, target_token_ms=5, sessions=2), 8).speedup < 1


def test_the_table_of_the_documentation_is_what_the_formula_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    row = (
        r"\| (\S+) / (\S+) ms(?: \+ (\S+) a token)? \| (\S+) \| (\S+) ms \| (\d+), (\d+) \| (\S+) \| (\S+) \|"
    )
    rows = re.findall(row, text)
    assert len(rows) == 7
    for step, token, added, acceptance, rtt, sessions, batch, speedup, drafters in rows:
        times = float(step), float(acceptance), float(rtt), float(token), None, float(added or 0)
        found = expect(Pair(*times, int(sessions), int(batch)), 8)
        assert (float(speedup), float(drafters)) == (round(found.speedup, 2), round(found.drafters, 2))


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"target_step_ms": 0}, "--target-step-ms"),
        ({"draft_token_ms": float("inf")}, "--draft-token-ms"),
        ({"rtt_ms": -1}, "--rtt-ms"),
        ({"rtt_ms": float("nan")}, "--rtt-ms"),
        ({"target_token_ms": -1}, "--target-token-ms"),
        ({"acceptance": 1}, "--acceptance"),
        ({"acceptance": float("nan")}, "--acceptance"),
        ({"sessions": 0}, "--sessions"),
        ({"draft_batch": 0}, "--draft-batch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, float], flag: str) -> None:
    values = {"target_step_ms": 13, "draft_token_ms": 1.5, "acceptance": 0.8, "rtt_ms": 1} | given
    with pytest.raises(StartupError, match=f"^{flag} must be") as refused:
        Pair(**values)  # type: ignore[arg-type]  # counts are whole in the cases above
    assert "\n" not in refused.value.message
