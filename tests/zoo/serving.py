"""What is asked of an engine that serves a model: the model's own greedy text in ragged batches with drafts,
and the same bits however a text is cut into steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable

PROMPT_LENGTHS = (1, 2, 7, 16, 33, 40, 65, 90)
OUTPUT = 48
# Tokens in each step, and whether other sessions run beside them.
PARTITIONS: tuple[tuple[tuple[int, ...], bool], ...] = (
    ((1,) * 70, True),
    ((1, 2, 3, 5, 9, 17, 33), False),
    ((33, 17, 9, 5, 3, 2, 1), True),
    ((7, 13, 1, 1, 48), True),
    ((69, 1), False),
)
LENGTH = 70


def prompts(rng: random.Random, vocab: int) -> list[list[int]]:
    """Returns prompts of different lengths; the last begins with the 40 tokens of the sixth."""
    found = [[rng.randrange(1, vocab) for _ in range(length)] for length in PROMPT_LENGTHS]
    found[-1][:40] = found[5]
    return found


def own_text(model: Any, prompt: Sequence[int]) -> list[int]:
    """Returns OUTPUT greedy tokens of the model's own code."""
    model.generation_config.eos_token_id = None  # do not stop early
    ids = torch.tensor([prompt])
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT, pad_token_id=0
    )
    found: list[int] = text[0, len(prompt) :].tolist()
    return found


@dataclass
class Session:
    log: list[int]
    expected: list[int]  # prompt and output of the model's own code
    table: BlockTable
    accepted: int = 0
    lost: bool = False  # whether it has lost its keys once, as in a failover

    @property
    def done(self) -> bool:
        return len(self.log) == len(self.expected)


@dataclass
class Served:
    sessions: list[Session]
    shared: int  # tokens of prompts that were found in the cache

    @property
    def own(self) -> bool:
        return all(session.log == session.expected for session in self.sessions)


def serve(
    engine: Engine, texts: Sequence[tuple[list[int], list[int]]], vocab: int, drafting: bool = True
) -> Served:
    """Runs prompts, each with its expected output, in ragged batches; the drafts are right up to a random
    place. Halfway, each session is computed again from its tokens alone, as in a failover."""
    rng, waiting = random.Random(3), list(texts)
    served = Served([], 0)
    while waiting or any(not session.done for session in served.sessions):
        # one comes in at every step, the last when the others are done, whose beginning may be in the cache
        if len(waiting) > 1 or (waiting and all(session.done for session in served.sessions)):
            prompt, output = waiting.pop(0)
            table = engine.pool.open(prompt)
            served.shared += table.length
            served.sessions.append(Session(list(prompt), [*prompt, *output], table))
        active = [session for session in served.sessions if not session.done and rng.random() < 0.9]
        if not active:
            continue
        for session in active:
            if not session.lost and 2 * (len(session.expected) - len(session.log)) < OUTPUT:
                engine.pool.close(session.table)
                session.table, session.lost = BlockTable(), True
        parts = [(session, *_part(engine, session, rng, vocab, drafting)) for session in active]
        chosen = engine.step([work for _, work, _ in parts]).argmax(-1).tolist()
        for session, work, drafts in parts:
            _commit(engine, session, drafts, [chosen.pop(0) for _ in range(work.rows)])
        assert not chosen
        engine.pool.check_integrity(session.table for session in served.sessions)
    for session in served.sessions:
        engine.pool.close(session.table)
    assert engine.pool.usage == 0
    return served


def logits_of(
    engine: Engine, tokens: Sequence[int], chunks: Sequence[int], company: bool, vocab: int
) -> torch.Tensor:
    """Returns [len(tokens), V], read in such chunks, each followed by wrong drafts that are taken back."""
    rng = random.Random(sum(chunks) * 100 + len(chunks))
    table, found = BlockTable(), []
    others = [BlockTable() for _ in range(4)] if company else []
    for chunk in chunks:
        start = table.length
        drafts = [rng.randrange(vocab) for _ in range(rng.randrange(0, 4))]
        engine.pool.extend(table, chunk + len(drafts))
        works = [Work(table.blocks, start, [*tokens[start : start + chunk], *drafts], chunk + len(drafts))]
        for other in others:
            n = rng.choice((1, 1, 3, 40))
            if other.length > 200:
                engine.pool.close(other)
            before = other.length
            engine.pool.extend(other, n)
            works.append(Work(other.blocks, before, [rng.randrange(vocab) for _ in range(n)], min(n, 2)))
        order = list(range(len(works)))
        rng.shuffle(order)
        logits = engine.step([works[i] for i in order])
        first = sum(works[i].rows for i in order[: order.index(0)])
        found.append(logits[first : first + chunk].clone())
        engine.pool.truncate(table, start + chunk)
    for used in (table, *others):
        engine.pool.close(used)
    return torch.cat(found)


def keeps_bits(engine: Engine, vocab: int) -> bool:
    """Returns whether logits have the same bits in all PARTITIONS."""
    rng = random.Random(5)
    tokens = [rng.randrange(vocab) for _ in range(LENGTH)]
    whole = logits_of(engine, tokens, [LENGTH], False, vocab)
    return all(
        torch.equal(logits_of(engine, tokens, chunks, company, vocab), whole)
        for chunks, company in PARTITIONS
    )


def _part(
    engine: Engine, session: Session, rng: random.Random, vocab: int, drafting: bool
) -> tuple[Work, list[int]]:
    """Returns a chunk of what is pending and, after its end, drafts."""
    start = session.table.length
    tokens = session.log[start:][: rng.randrange(1, 30)]
    drafts: list[int] = []
    if drafting and start + len(tokens) == len(session.log):
        room = len(session.expected) - len(session.log) - 1
        drafts = session.expected[len(session.log) :][: min(rng.randrange(0, 9), room)]
        wrong = rng.randrange(0, 12)
        if wrong < len(drafts):
            drafts[wrong:] = [rng.randrange(vocab) for _ in drafts[wrong:]]
    final = start + len(tokens) == len(session.log)
    engine.pool.extend(session.table, len(tokens) + len(drafts))
    return Work(session.table.blocks, start, [*tokens, *drafts], len(drafts) + 1 if final else 0), drafts


def _commit(engine: Engine, session: Session, drafts: list[int], rows: list[int]) -> None:
    """Accepts drafts up to the first difference, then the row's own token; gives the rest back."""
    if rows:
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == rows[accepted]:
            accepted += 1
        session.accepted += accepted
        standing = len(session.log) + accepted
        session.log += rows[: accepted + 1]
        engine.pool.truncate(session.table, standing)
    engine.pool.seal(session.table, session.log)
