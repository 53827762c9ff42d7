"""What a session without drafts pays for what is verified of others, in virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from tests.verifier.virtual_time import PROMPT, Verifier, run, truth
from verifier.meter import LONGEST_STEP
from verifier.session import SessionSpec
from verifier.stepper import StepReport

STEP, ROW = 0.02, 0.0004  # seconds of a step of one token, and of each further one
STEPS = {1: STEP, 513: STEP + 512 * ROW}
SECONDS, K = 5.0, 32
OTHERS = 15
TEXT = tuple(truth(position) for position in range(len(PROMPT), len(PROMPT) + 10_000))


@dataclass
class Counted:
    plain: int  # tokens of a session that has no drafts
    others: int  # of the others together
    rows: int  # in a step, at most


async def _counted(predicted: int, plain: int) -> Counted:
    """So many sessions know their text in advance, and so many do not; the last of these is told."""
    verifier, found = Verifier(STEPS), Counted(0, 0, 0)
    for number in range(predicted + plain):
        prediction = TEXT if number < predicted else ()
        params = SessionParams(PROMPT, SamplingParams(temperature=0.0), 30_000, prediction=prediction)
        verifier.stepper.open(SessionSpec(bytes([number]) * 16, params, (), 199, b""), K)
    last = bytes([predicted + plain - 1]) * 16

    def on_step(report: StepReport) -> None:
        found.rows = max(found.rows, report.load.step_tokens)
        for running, outcome in report.outcomes:
            if running.id == last:
                found.plain += len(outcome.tokens)
            else:
                found.others += len(outcome.tokens)

    verifier.stepper._on_step = on_step
    stepping = asyncio.create_task(verifier.stepper.run())
    await asyncio.sleep(SECONDS)
    stepping.cancel()
    await asyncio.gather(stepping, return_exceptions=True)
    return found


def counted(predicted: int, plain: int) -> Counted:
    found = run(_counted(predicted, plain))
    assert isinstance(found, Counted)
    return found


def test_who_has_no_drafts_does_not_wait_for_those_of_all_others() -> None:
    """Texts that are known in advance, by a prediction or a grammar, would fill the step."""
    company, beside = counted(0, OTHERS + 1), counted(OTHERS, 1)
    assert beside.plain >= company.plain / LONGEST_STEP
    assert beside.others > company.others, "what others have room for is used"


def test_where_all_have_drafts_all_that_pay_take_part() -> None:
    all_of_them = counted(OTHERS + 1, 0)
    assert all_of_them.rows >= (OTHERS + 1) * K // 2, "nobody waits without having something of it"
