"""What a drafter brings where a grammar forces tokens, which the verifier guesses itself."""

from __future__ import annotations

import pytest

from outrider.wire.guesses import OwnCounts
from router.requests import TokensCommitted
from router.session_draft import SessionDraft
from tests.router.test_drafter_merits import Simulation, always
from tests.router.test_large_fleet import fleet_of


class Forced(Simulation):
    """Every other step begins with three tokens that a grammar forces."""

    beyond = 3  # tokens of the drafter that stand behind them, and are right; in the other steps it is late

    def _step(self, draft: SessionDraft, step: int) -> int:
        (drafter,) = [drafter for _, drafter in draft._seated] or [None]
        self.steps[None if drafter is None else drafter.identity.worker_id] += 1
        if step % 2:
            draft.committed(TokensCommitted((7,), 0, 0))
            return 1
        accepted = 3 + (self.beyond if drafter is not None else 0)
        forced = OwnCounts(0, 0, 3, 3)
        draft.committed(TokensCommitted((7,) * (1 + accepted), accepted, accepted, own=forced))
        return 1 + accepted


@pytest.mark.parametrize(("beyond", "least", "most"), [(3, 0.95, 1.0), (0, 0.0, 0.2)])
async def test_behind_what_a_grammar_forces_a_drafter_is_judged_by_what_it_adds(
    beyond: int, least: float, most: float
) -> None:
    forced = Forced(await fleet_of(1, 1), always(0.0))
    forced.beyond = beyond
    forced.run()
    assert least <= forced.share(0) <= most
