"""Attention by native_attention.cpp: right, with the same bits in any company, chunks and trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from outrider.engine import native_attention
from outrider.engine.attention import LayerAttention
from outrider.engine.branching import LayOut, lay_out, lay_out_in_order
from outrider.engine.native import library
from outrider.engine.native_attention import NativeAttention, NativePools
from outrider.engine.step_inputs import Work

pytestmark = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
USUAL = LayerAttention(6, 2, 64, 64, None, 0.125, None)
WAYS = {
    "usual": USUAL,
    "window": replace(USUAL, window=21),
    "chunks": replace(USUAL, chunk=24),
    "capped": replace(USUAL, softcap=0.7),
    "sinks": replace(USUAL, sinks=True),
    "widths": LayerAttention(4, 4, 24, 10, None, 0.2, None),
    "one head of keys": LayerAttention(8, 1, 80, 80, None, 0.1, None),
}
BLOCKS = 40


class Text:
    """A session of random tokens, whose blocks are scattered."""

    def __init__(self, how: LayerAttention, seed: int, length: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.how, self.length = how, length
        self.query = torch.randn(how.query_heads, length, how.width, generator=generator)
        self.key = torch.randn(how.key_heads, length, how.width, generator=generator)
        self.value = torch.randn(how.key_heads, length, how.value_width, generator=generator)
        self.blocks = torch.randperm(BLOCKS, generator=generator).tolist()

    def expected(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """Returns what its tokens get, in double precision: [T, Hq, Dv]."""
        how, place = self.how, torch.arange(self.length)
        key, value = (each.double().repeat_interleave(how.sharing, 0) for each in (self.key, self.value))
        scores = self.query.double() @ key.transpose(1, 2) * how.scale
        if how.softcap:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        hidden = place > place[:, None]
        if how.window:
            hidden |= place <= place[:, None] - how.window
        if how.chunk:
            hidden |= place < place[:, None] // how.chunk * how.chunk
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            column = sinks.double()[:, None, None].expand(-1, self.length, 1)
            scores = torch.cat([scores, column], -1)
        return (scores.softmax(-1)[..., : self.length] @ value).transpose(0, 1)


def sinks_of(how: LayerAttention) -> torch.Tensor | None:
    return torch.linspace(-2, 2, how.query_heads) if how.sinks else None


def step(attention: NativeAttention, parts: list[tuple[Text, Work, list[int]]]) -> list[torch.Tensor]:
    """Runs tokens of some texts, those of these numbers, side by side; returns what each text's get."""
    inputs = attention.prepare([work for _, work, _ in parts])
    firsts = inputs.tables.first
    order = sorted(
        range(len(parts)),
        key=lambda index: firsts.tolist().index(sum(len(p[1].blocks) for p in parts[:index])),
    )
    rows = [(parts[index][0], parts[index][2]) for index in order]
    query, key, value = (
        torch.cat([getattr(text, name)[:, tokens] for text, tokens in rows], 1)
        for name in ("query", "key", "value")
    )
    how = rows[0][0].how
    found = attention.attend(0, query, key, value, inputs, how, sinks_of(how))
    split = dict(zip(order, torch.split(found, [len(tokens) for _, tokens in rows]), strict=True))
    return [split[index] for index in range(len(parts))]


def read(text: Text, chunks: list[int], other: Text | None = None) -> torch.Tensor:
    """Reads a text in chunks, beside another if there is one."""
    attention, found, start = NativeAttention(NativePools(2 * BLOCKS, 16)), [], 0
    for count in chunks:
        parts = [(text, Work(text.blocks, start, [0] * count, 0), list(range(start, start + count)))]
        if other is not None:
            blocks = [BLOCKS + block for block in other.blocks]
            parts.append((other, Work(blocks, 0, [0] * (count + 3), 0), list(range(count + 3))))
        found.append(step(attention, parts)[0])
        start += count
    return torch.cat(found)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS.keys())
def test_it_is_right_and_a_token_gets_its_bits_in_any_company(how: LayerAttention) -> None:
    text = Text(how, 1, 131)
    whole = read(text, [131])
    expected = text.expected(sinks_of(how))
    assert (whole - expected).norm() < 1e-6 * expected.norm()
    other = Text(how, 2, 131)
    assert torch.equal(read(text, [64, 1, 2, 17, 5, 33, 9], other), whole)
    assert torch.equal(read(text, [1] * 40 + [91]), whole)


@pytest.mark.parametrize("laid_out", [lay_out_in_order, partial(lay_out, 512)], ids=["in order", "apart"])
@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS.keys())
def test_a_token_on_a_branch_gets_the_bits_of_a_text_that_goes_on_so(
    how: LayerAttention, laid_out: LayOut
) -> None:
    text, line, before = Text(how, 3, 90), 3, 60
    # A line of three, beside it a branch of the text's own tokens, and one that leaves that branch.
    own = list(range(before, before + 12))
    parents = [*range(-1, line - 1), -1, *range(line, line + 11), line + 4]
    places = laid_out(before, before, parents)
    assert None not in places
    attention = NativeAttention(NativePools(2 * BLOCKS, 16))
    step(attention, [(text, Work(text.blocks, 0, [0] * before, 0), list(range(before)))])
    tokens = [80, 81, 82, *own, 89]
    tree = Work(
        text.blocks, before, [0] * len(tokens), 0, parents, [place for place in places if place is not None]
    )
    found = step(attention, [(text, tree, tokens)])[0]
    expected = read(text, [before + 12])
    assert torch.equal(found[line : line + 12], expected[before:])


def test_if_a_branch_has_other_bits_a_step_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = NativeAttention(NativePools(2 * BLOCKS, 16))
    attention.layers = {0: USUAL}
    assert attention.keeps_bits() and attention.resized(BLOCKS).lay_out is not None
    tried = native_attention._tried

    def broken(how: LayerAttention, chunks: Sequence[int], line: int = 0) -> torch.Tensor:
        found = tried(how, chunks, line)
        found[-1, 0, 0] += 1e-6 if line else 0.0
        return found

    monkeypatch.setattr(native_attention, "_tried", broken)
    assert attention.keeps_bits() and attention.lay_out is None
    assert attention.resized(BLOCKS).lay_out is None
    with pytest.raises(ValueError, match="takes no branches"):
        attention.prepare([Work([0], 0, [0] * 3, 0, [-1, -1, 0], [0, 1, 2])])


def test_slots_are_copied_and_what_others_left_there_does_no_harm() -> None:
    how, text = USUAL, Text(USUAL, 4, 60)
    attention = NativeAttention(NativePools(2 * BLOCKS, 16))
    keys, values = attention.pools.made(0, how)
    keys.fill_(float("nan"))
    values.fill_(float("nan"))
    first = step(attention, [(text, Work(text.blocks, 0, [0] * 50, 0), list(range(50)))])[0]
    sources = torch.tensor([text.blocks[place // 16] * 16 + place % 16 for place in range(50)])
    targets = torch.tensor([(BLOCKS + place // 16) * 16 + place % 16 for place in range(50)])
    attention.pools.copy_slots(0, (sources, targets))
    moved = Work([BLOCKS + block for block in range(5)], 50, [0] * 10, 0)
    rest = step(attention, [(text, moved, list(range(50, 60)))])[0]
    assert torch.equal(torch.cat([first, rest]), read(text, [60]))
    bigger = attention.resized(3 * BLOCKS)
    assert [pool.shape[1] for pool in bigger.pools.of(0)] == [3 * BLOCKS + 1] * 2


def test_a_model_that_is_loaded_beside_it_in_other_numbers_changes_nothing() -> None:
    """While transformers loads one, torch's default is the type of that one's numbers."""
    text = Text(USUAL, 5, 60)
    expected, usual = read(text, [60]), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = read(text, [60])
    finally:
        torch.set_default_dtype(usual)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_what_is_not_in_float32_is_refused_before_it_is_read() -> None:
    text = Text(USUAL, 6, 20)
    text.value = text.value.to(torch.bfloat16)
    with pytest.raises(TypeError, match="in float32, not in"):
        read(text, [20])


def test_slots_may_change_places() -> None:
    how = WAYS["widths"]
    pools = NativePools(3, 16)
    keys, values = pools.made(0, how)
    keys.copy_(torch.randn(keys.shape)), values.copy_(torch.randn(values.shape))

    def held(slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        return keys[:, slot // 16, :, slot % 16].clone(), values[:, slot // 16, slot % 16].clone()

    before = [held(slot) for slot in range(48)]
    pools.copy_slots(0, (torch.tensor([3, 37, 3]), torch.tensor([37, 3, 20])))
    came_from = {37: 3, 3: 37, 20: 3}
    for slot in range(48):
        assert all(map(torch.equal, held(slot), before[came_from.get(slot, slot)]))
