from __future__ import annotations

import random

import numpy as np

from outrider.engine.state_slots import Turn
from outrider.engine.step_inputs import Work
from outrider.engine.step_message import Kind, StepMessage, decode, encode, encode_works
from outrider.sampling.how import How
from outrider.sampling.vocab_parallel import VocabParallelRow


def random_plan(
    rng: random.Random, sessions: int, context: int, drafts: int, trees: float = 0.0, states: float = 0.0
) -> StepMessage:
    """Sessions of so many tokens that decode with so many drafts each."""
    works, rows = [], []
    for _ in range(sessions):
        blocks = [rng.randrange(10**5) for _ in range(-(-(context + drafts + 1) // 16))]
        tokens = [rng.randrange(2**18) for _ in range(drafts + 1)]
        parents = tuple(rng.randrange(-1, index) for index in range(drafts)) if rng.random() < trees else ()
        moves = tuple(
            (rng.randrange(10**6), rng.randrange(10**6)) for _ in range(rng.randrange(3) if parents else 0)
        )
        turn = Turn(*(rng.randrange(-1, 10**6) for _ in Turn._fields)) if rng.random() < states else None
        works.append(Work(blocks, context, tokens, drafts + 1, parents, parents, moves, turn=turn))
        rows += [
            VocabParallelRow(rng.choice(list(How)), rng.getrandbits(64), rng.choice([1.0, 1e-30, 0.1, 100.0]))
            for _ in tokens
        ]
    return StepMessage(Kind.CHOOSE, tuple(works), tuple(rows), 2**18)


def words_of(message: StepMessage) -> np.ndarray:
    return encode(message.kind, encode_works(message.works), message.rows, message.vocab_size)


def test_what_arrives_is_what_was_sent() -> None:
    rng = random.Random(1)
    for _ in range(50):
        message = random_plan(rng, rng.randrange(1, 9), rng.randrange(3000), rng.randrange(9), 0.5, 0.5)
        assert decode(words_of(message)) == message
    edge = (
        VocabParallelRow(How.NOISY, 2**64 - 1, 5e-324),
        VocabParallelRow(How.GREEDY),
        VocabParallelRow(How.WHOLE, 0, 1 / 3),
    )
    message = StepMessage(Kind.CHOOSE, (Work([7], 0, [1, 2], 0),), edge, 5)
    assert decode(words_of(message)) == message
    whole_number = StepMessage(Kind.CHOOSE, rows=(VocabParallelRow(How.NOISY, 1, 2),))
    assert decode(encode(Kind.CHOOSE, rows=whole_number.rows)) == whole_number
    for kind in (Kind.STOP, Kind.ANSWER):
        assert decode(encode(kind)) == StepMessage(kind)
    logits = StepMessage(Kind.LOGITS, (Work([3, 1], 4, [9], 1),))
    assert decode(encode(Kind.LOGITS, encode_works(logits.works))) == logits


def test_a_step_of_eight_sessions_is_a_few_kilobytes() -> None:
    """Eight chats of a thousand tokens, eight drafts each."""
    message = random_plan(random.Random(2), 8, 1000, 8)
    assert words_of(message).nbytes < 4096
    plain = random_plan(random.Random(3), 8, 1000, 0)
    assert words_of(plain).nbytes < 2600
