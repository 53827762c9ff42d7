"""The drafter's steps on a real engine: branches, scoring, and what its cache holds after any commit."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from drafter.branches import MOST_BRANCHES, growths
from drafter.drafting import Drafting
from drafter.session import DraftSession, DraftSpec
from drafter.stepper import FOLLOWED_AT_ONCE, LIKELY, SPARE_ROWS, DraftStepper
from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.loading import load_engine
from outrider.options.engine import StepLimits
from outrider.sampling.params import SamplingParams
from outrider.sampling.ranked import Ranked
from outrider.wire.session import SessionParams
from tests.tiny_models import build

VOCAB = 199
PROMPT = tuple(range(3, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("draft"))


@pytest.fixture
def engine(model: Path) -> Engine:
    return load_engine(str(model), name="draft", kv_memory_bytes=8 * 2**20, threads=1)


class Heard:
    """The link's part: what it would send is told."""

    def __init__(self) -> None:
        self.messages = 0

    def __call__(self, changed: Sequence[DraftSession]) -> None:
        for session in changed:
            session.tell()
            self.messages += 1


@asynccontextmanager
async def running(
    engine: Engine, heard: Callable[[Sequence[DraftSession]], None], branches: bool = True
) -> AsyncIterator[DraftStepper]:
    def failed(session: DraftSession, reason: str) -> None:
        raise AssertionError(reason)

    stepper = DraftStepper(engine, StepLimits(), heard, failed, time.monotonic, branches)
    task = asyncio.create_task(stepper.run())
    try:
        yield stepper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def spec(
    number: int = 0,
    output: tuple[int, ...] = (),
    sampling: SamplingParams | None = None,
    prompt: tuple[int, ...] = PROMPT,
) -> DraftSpec:
    greedy = SamplingParams(temperature=0.0)
    return DraftSpec(bytes([number]) * 16, SessionParams(prompt, sampling or greedy, 400), output, b"", VOCAB)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def idle(stepper: DraftStepper, drafting: Drafting) -> Callable[[], bool]:
    """Returns a function that is true once there is nothing left to do for the session."""
    session = drafting.session
    return lambda: (
        not stepper._commits
        and not session.wants_token
        and drafting.table.length >= session.length - 1
        and not list(growths(session, drafting.table.length))
        and all(branch.table.length >= branch.at + len(branch.guesses) for branch in session.branches)
    )


def count_steps(engine: Engine) -> list[int]:
    """Which grows by one with each step from now on."""
    steps, rank = [], engine.rank

    def counted(*args: object) -> object:
        steps.append(1)
        return rank(*args)  # type: ignore[arg-type]

    engine.rank = counted  # type: ignore[assignment,method-assign]
    return steps


async def commit(stepper: DraftStepper, drafting: Drafting, tokens: list[int]) -> None:
    stepper.commit(drafting.session, len(drafting.session.log), tokens)
    await until(lambda: not stepper._commits)


def tokens(drafting: Drafting) -> list[int]:
    return [guess.token for guess in drafting.session.drafted]


def tables(*sessions: Drafting) -> list[object]:
    return [table for one in sessions for table in (one.table, *(b.table for b in one.session.branches))]


async def fresh(model: Path, drafting: Drafting) -> list[int]:
    """What a drafter that has seen nothing drafts from the same log."""
    session = drafting.session
    engine = load_engine(str(model), name="draft", kv_memory_bytes=8 * 2**20, threads=1)
    async with running(engine, Heard()) as stepper:
        output = tuple(session.log[len(PROMPT) :])
        other = stepper.open(DraftSession(spec(9, output, session.spec.params.sampling), session.window))
        await until(lambda: not other.session.wants_token)
    return tokens(other)


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=4, frequency_penalty=0.7)],
    ids=["greedy", "sampled"],
)
async def test_a_branch_that_the_target_takes_goes_on_with_its_own_cache(
    engine: Engine, model: Path, sampling: SamplingParams
) -> None:
    async with running(engine, Heard()) as stepper:
        drafting = stepper.open(DraftSession(spec(sampling=sampling), 6))
        await until(idle(stepper, drafting))
        session = drafting.session
        engine.pool.check_integrity(tables(drafting))  # type: ignore[arg-type]
        branch = max(session.branches, key=lambda branch: (branch.at % 16 != 0, len(branch.guesses)))
        ahead = [guess.token for guess in branch.guesses]
        assert ahead and 0 < len(session.branches) <= 2 * MOST_BRANCHES
        prefix = tokens(drafting)[: branch.at - len(session.log)]
        await commit(stepper, drafting, [*prefix, branch.token])
        assert tokens(drafting)[: len(ahead)] == ahead
        assert (stepper.load.rejections, stepper.load.rejections_covered) == (1, 1)
        await until(idle(stepper, drafting))
        assert tokens(drafting) == await fresh(model, drafting)
        engine.pool.check_integrity(tables(drafting))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["llama", "qwen3_next"])
async def test_after_any_commits_the_draft_is_that_of_a_drafter_that_has_just_begun(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target goes along the trunk, along a branch, or its own way; the pool is small enough to matter,
    and so are the slots of recurrent states, of a model that has them."""
    model = build(arch, tmp_path)
    engine = load_engine(str(model), name="draft", kv_memory_bytes=8 * 2**20, threads=1)
    attention = engine.attention
    if attention.states is not None:
        attention.states = attention.states.resized(2, attention.pools.num_blocks)  # type: ignore[misc]
    engine.pool = BlockPool(24, 16, attention.states and attention.states.slots)
    rng, lost = random.Random(5), list[bool]()
    plain = Drafting.lost
    monkeypatch.setattr(Drafting, "lost", lambda *args: lost.append(found := plain(*args)) or found)
    async with running(engine, Heard()) as stepper:
        all_of_them = [stepper.open(DraftSession(spec(number), 5)) for number in (1, 2, 3)]
        for _ in range(60):
            drafting = rng.choice(all_of_them)
            session = drafting.session
            if rng.random() < 0.8:
                await until(lambda session=session: not session.wants_token)  # type: ignore[misc]
                await asyncio.sleep(rng.choice([0, 0.003, 0.02]))
            path = tokens(drafting)
            news = path[: rng.randrange(len(path) + 1)]
            if session.branches and rng.random() < 0.6:
                branch = rng.choice(session.branches)
                news = [*path[: branch.at - len(session.log)], branch.token]
                news += [guess.token for guess in branch.guesses[: rng.randrange(3)]]
            news += [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 3]))]
            if news:
                await commit(stepper, drafting, news)
        # the run did what it is for
        assert sum(lost) > 5 if engine.pool.states else stepper.load.rejections_covered > 5
        for drafting in all_of_them:
            await until(lambda drafting=drafting: not drafting.session.wants_token)  # type: ignore[misc]
            assert tokens(drafting) == await fresh(model, drafting)
        await asyncio.sleep(0.05)
        engine.pool.check_integrity(tables(*all_of_them))  # type: ignore[arg-type]
        for number in (1, 2, 3):
            stepper.close(bytes([number]) * 16)
        assert engine.pool.usage == 0


async def test_every_committed_position_is_a_trial(engine: Engine) -> None:
    """Guesses that were held, corrections, tokens beyond the draft, and stretches without drafting."""
    rng = random.Random(1)
    async with running(engine, Heard()) as stepper:
        drafting = stepper.open(DraftSession(spec(), 3))
        session, trials = (
            drafting.session,
            stepper.acceptance_models[drafting.session.spec.params.sampling.greedy].taken,
        )
        committed = 0
        for kind in ("held", "correction", "beyond", "several", "beyond"):
            await until(lambda: not session.wants_token)
            path = tokens(drafting)
            wrong = (path[0] + 1) % VOCAB
            news = {
                "held": path[:2],
                "correction": [wrong],
                "beyond": [*path, rng.randrange(VOCAB)],
                "several": [wrong, *(rng.randrange(VOCAB) for _ in range(5))],
            }[kind]
            await commit(stepper, drafting, news)
            committed += len(news)
            await until(lambda: not session.wants_token)
            assert trials.trials == committed, kind
        session.window = 0
        await commit(stepper, drafting, tokens(drafting))  # ends the draft
        committed = trials.trials
        for _ in range(3 * FOLLOWED_AT_ONCE):
            await commit(stepper, drafting, [rng.randrange(VOCAB)])
        await until(lambda: trials.trials >= committed + 2 * FOLLOWED_AT_ONCE)
        assert session.drafted == []


async def test_branches_wait_while_a_trunk_has_a_likely_token_to_draft(engine: Engine) -> None:
    """A step that runs branches runs no likely trunk, and none stands waiting beside it."""
    async with running(engine, Heard()) as stepper:
        steps = []

        def watched(parts: object, *args: object) -> object:
            waiting = [
                one.session.survival
                for one in stepper._sessions.values()
                if one.session.wants_token and one not in [part.drafting for part in parts]  # type: ignore[attr-defined]
            ]
            steps.append((any(part.branch is not None for part in parts), max(waiting, default=0.0)))  # type: ignore[attr-defined]
            return finish(parts, *args)  # type: ignore[arg-type]

        finish, stepper._finish = stepper._finish, watched  # type: ignore[assignment,method-assign]
        all_of_them = [
            stepper.open(DraftSession(spec(number, prompt=(*PROMPT, number)), 6))
            for number in range(2 * SPARE_ROWS)  # more than would fit beside branches
        ]
        for _ in range(6):
            for drafting in all_of_them[:3]:  # these have time for branches
                await until(idle(stepper, drafting))
            for drafting in all_of_them:
                stepper.commit(drafting.session, len(drafting.session.log), tokens(drafting)[:3])
        for drafting in all_of_them:
            await until(idle(stepper, drafting))
    assert {branches for branches, _ in steps} == {True, False}
    assert all(waiting < LIKELY for branches, waiting in steps if branches)


@pytest.mark.parametrize(("divided", "branches"), [(True, True), (False, False)])
async def test_no_branches_where_the_model_is_divided_or_they_are_switched_off(
    engine: Engine, divided: bool, branches: bool
) -> None:
    engine.divided = divided
    async with running(engine, Heard(), branches) as stepper:
        drafting = stepper.open(DraftSession(spec(), 6))
        await until(lambda: not drafting.session.wants_token)
        await asyncio.sleep(0.05)
        assert drafting.session.branches == []


async def test_far_fewer_messages_than_steps_and_nothing_left_untold(engine: Engine) -> None:
    heard, commits = Heard(), 8
    steps = count_steps(engine)
    async with running(engine, heard) as stepper:
        drafting = stepper.open(DraftSession(spec(), 40))
        for _ in range(commits):
            await until(idle(stepper, drafting))
            await asyncio.sleep(0.01)
            assert not drafting.session.untold_yet
            await commit(stepper, drafting, tokens(drafting)[:36])
    assert heard.messages <= 0.4 * (len(steps) + commits)  # each of them would have something to tell


async def test_what_a_short_step_found_is_on_its_way_before_the_next_one_begins(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.stepper.SHORT_SECONDS", 60.0)
    told, sent = asyncio.Event(), []
    steps = count_steps(engine)

    def heard(changed: Sequence[DraftSession]) -> None:
        for session in changed:
            session.tell()
        told.set()

    async def send() -> None:
        while True:
            await told.wait()
            told.clear()
            sent.append(len(steps))

    async with running(engine, heard) as stepper:
        drafting = stepper.open(DraftSession(spec(), 8))
        await until(idle(stepper, drafting))
        sender = asyncio.create_task(send())
        for _ in range(5):
            await until(lambda: not told.is_set())  # of what was there before it has sent
            steps.clear()
            sent.clear()
            await commit(stepper, drafting, [(tokens(drafting)[0] + 1) % VOCAB])  # not what was drafted
            await until(idle(stepper, drafting))
            assert sent[:2] == [1, 2]
        sender.cancel()


@pytest.mark.parametrize("on_cpu", [True, False])
async def test_no_step_of_a_gpu_runs_on_the_event_loops_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    monkeypatch.setattr("drafter.stepper.SHORT_SECONDS", 60.0)
    engine.on_cpu = on_cpu
    ran, rank = list[threading.Thread](), engine.rank

    def noted(*arguments: Any) -> list[Ranked]:
        ran.append(threading.current_thread())
        return rank(*arguments)

    monkeypatch.setattr(engine, "rank", noted)
    async with running(engine, Heard()) as stepper:
        await until(idle(stepper, stepper.open(DraftSession(spec(), 8))))
    assert len(ran) >= 8
    assert (threading.current_thread() in ran) is on_cpu


async def test_a_resting_session_takes_no_forward_and_then_catches_up(engine: Engine) -> None:
    heard = Heard()
    async with running(engine, heard) as stepper:
        steps = count_steps(engine)
        session = DraftSession(spec(), 4)
        session.resting = True
        drafting = stepper.open(session)
        other = stepper.open(DraftSession(spec(1, prompt=(9, 8, 7)), 2))
        await until(idle(stepper, other))
        taken = len(steps)
        await commit(stepper, drafting, [3, 4, 5, 6, 7, 8, 9, 10, 11])
        stepper.set_window(session.id, 0)  # nor does it read on in its log
        await commit(stepper, drafting, [12])
        stepper.set_window(session.id, 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(steps) == taken and not drafting.table.blocks
        session.resting = False
        await commit(stepper, drafting, [13])
        await until(lambda: len(session.drafted) == 4)
    assert len(steps) > taken


async def test_prompts_of_tenants_are_read_in_turns(engine: Engine) -> None:
    """However many one has sent before, another is drafted for soon."""
    stepper = DraftStepper(engine, StepLimits(64, 64), Heard(), lambda session, reason: None, time.monotonic)
    for number, tenant in enumerate(b"aaaaab"):
        params = SessionParams(
            (*PROMPT, number), SamplingParams(temperature=0.0), 400, tenant=bytes([tenant])
        )
        stepper.open(DraftSession(DraftSpec(bytes([number]) * 16, params, (), b"", VOCAB), 6))
    read = [part.drafting.session.spec.params.tenant for part in stepper._next_step()]
    assert read == [b"a", b"b"]
