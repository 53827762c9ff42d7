"""Every architecture that must pass: greedy text equals the model's own, and logits keep their bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from tests.tiny_models import ARCHITECTURES

VOCAB = 199
PROMPT_LENGTHS = (1, 2, 7, 16, 33, 40, 65, 90)
OUTPUT = 40


def prompts(rng: random.Random) -> list[list[int]]:
    """Different lengths; the last begins with the 40 tokens of the sixth."""
    found = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]
    found[-1][:40] = found[5]
    return found


def reference(folder: Path, prompt: Sequence[int]) -> list[int]:
    """OUTPUT greedy tokens of the model's own code."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.generation_config.eos_token_id = None  # do not stop early
    ids = torch.tensor([prompt])
    text = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=OUTPUT, pad_token_id=0
    )
    return text[0, len(prompt) :].tolist()


@dataclass
class Session:
    log: list[int]
    expected: list[int]  # prompt and output of the reference
    table: BlockTable
    accepted: int = 0

    @property
    def done(self) -> bool:
        return len(self.log) == len(self.expected)


def take_part(engine: Engine, session: Session, rng: random.Random) -> tuple[Work, list[int]]:
    """A chunk of what is pending and, after its end, drafts that are right up to a random place."""
    start = session.table.length
    tokens = session.log[start:][: rng.randrange(1, 30)]
    drafts: list[int] = []
    if start + len(tokens) == len(session.log):
        room = len(session.expected) - len(session.log) - 1
        drafts = session.expected[len(session.log) :][: min(rng.randrange(0, 9), room)]
        wrong = rng.randrange(0, 12)
        if wrong < len(drafts):
            drafts[wrong:] = [rng.randrange(VOCAB) for _ in drafts[wrong:]]
    final = start + len(tokens) == len(session.log)
    engine.pool.extend(session.table, len(tokens) + len(drafts))
    return Work(session.table.blocks, start, [*tokens, *drafts], len(drafts) + 1 if final else 0), drafts


def commit(engine: Engine, session: Session, drafts: list[int], rows: list[int]) -> None:
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


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ragged_batches_give_the_models_own_greedy_text(
    arch: str, checkpoint: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    rng = random.Random(3)
    folder = checkpoint(arch)
    running = engine(arch)
    waiting = [(prompt, reference(folder, prompt)) for prompt in prompts(rng)]
    assert len({token for _, output in waiting for token in output}) > 10, "the text does not vary"
    sessions: list[Session] = []
    shared = 0
    while waiting or any(not session.done for session in sessions):
        # one comes in at every step, the last when the one that it shares its beginning with is in the cache
        if len(waiting) > 1 or (waiting and sessions[5].done):
            prompt, output = waiting.pop(0)
            sessions.append(Session(list(prompt), [*prompt, *output], running.pool.open(prompt)))
            shared += sessions[-1].table.length
        active = [session for session in sessions if not session.done and rng.random() < 0.9]
        if not active:
            continue
        parts = [(session, *take_part(running, session, rng)) for session in active]
        chosen = running.step([work for _, work, _ in parts]).argmax(-1).tolist()
        for session, work, drafts in parts:
            commit(running, session, drafts, [chosen.pop(0) for _ in range(work.rows)])
        assert not chosen
        running.pool.check_integrity(session.table for session in sessions)
    for session in sessions:
        assert session.log == session.expected
        running.pool.close(session.table)
    assert shared >= 32 and sum(session.accepted for session in sessions) > 50
    assert running.pool.usage == 0


def logits_of(engine: Engine, tokens: Sequence[int], chunks: Sequence[int], company: bool) -> torch.Tensor:
    """[len(tokens), V], read in such chunks, each followed by wrong drafts that are taken back."""
    rng = random.Random(sum(chunks) * 100 + len(chunks))
    table, found = BlockTable(), []
    others = [BlockTable() for _ in range(4)] if company else []
    for chunk in chunks:
        start = table.length
        drafts = [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 4))]
        engine.pool.extend(table, chunk + len(drafts))
        works = [Work(table.blocks, start, [*tokens[start : start + chunk], *drafts], chunk + len(drafts))]
        for other in others:
            n = rng.choice((1, 1, 3, 40))
            if other.length > 200:
                engine.pool.close(other)
            before = other.length
            engine.pool.extend(other, n)
            works.append(Work(other.blocks, before, [rng.randrange(VOCAB) for _ in range(n)], min(n, 2)))
        order = list(range(len(works)))
        rng.shuffle(order)
        logits = engine.step([works[i] for i in order])
        first = sum(works[i].rows for i in order[: order.index(0)])
        found.append(logits[first : first + chunk].clone())
        engine.pool.truncate(table, start + chunk)
    for used in (table, *others):
        engine.pool.close(used)
    return torch.cat(found)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_keep_their_bits(arch: str, engine: Callable[..., Engine]) -> None:
    running = engine(arch)
    assert running.info.bit_exact
    rng = random.Random(5)
    tokens = [rng.randrange(VOCAB) for _ in range(150)]
    whole = logits_of(running, tokens, [150], company=False)
    pieces = ([1] * 150, True), ([5] * 30, False), ([9, 1, 64, 1, 1, 70, 4], True), ([149, 1], True)
    for chunks, company in pieces:
        assert torch.equal(logits_of(running, tokens, chunks, company), whole), (chunks, company)


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2"])
def test_logits_keep_their_bits_over_many_keys(arch: str, engine: Callable[..., Engine]) -> None:
    running = engine(arch)
    rng = random.Random(6)
    tokens = [rng.randrange(VOCAB) for _ in range(900)]
    whole = logits_of(running, tokens, [900], company=False)
    pieces = [200, 55, 1, 9, 240, 6, 1, 1, 1, 130, 200, 1, 55]
    assert torch.equal(logits_of(running, tokens, pieces, company=True), whole)


def test_widths_that_kernels_cannot_take_whole_keep_their_bits(engine: Callable[..., Engine]) -> None:
    running = engine("llama", intermediate_size=50, vocab_size=VOCAB, head_dim=12)
    assert running.info.bit_exact
    tokens = [random.Random(8).randrange(VOCAB) for _ in range(80)]
    whole = logits_of(running, tokens, [80], company=False)
    for chunks in ([1] * 80, [3, 5, 7, 64, 1]):
        assert torch.equal(logits_of(running, tokens, chunks, company=True), whole)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt2"])
def test_logits_keep_their_bits_on_two_threads(arch: str, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint(arch)
    tokens = [random.Random(9).randrange(VOCAB) for _ in range(90)]
    found = []
    try:
        for threads in (1, 2):
            running = load_engine(str(folder), threads=threads, kv_memory_bytes=2**24)
            assert running.info.bit_exact
            for chunks in ([90], [30, 1, 40, 1, 18]):
                found.append(logits_of(running, tokens, chunks, company=True))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_a_chunk_in_the_middle_of_a_prompt_gives_no_rows(engine: Callable[..., Engine]) -> None:
    running = engine("llama")
    table = BlockTable()
    running.pool.extend(table, 40)
    assert running.step([Work(table.blocks, 0, [1] * 40, 0)]).shape == (0, VOCAB)
    other = BlockTable()
    running.pool.extend(other, 1)
    running.pool.extend(table, 3)
    logits = running.step([Work(table.blocks, 40, [1, 2, 3], 2), Work(other.blocks, 0, [5], 1)])
    assert logits.shape == (3, VOCAB) and logits.dtype == torch.float32
