"""The kernels that draw tokens, in Triton's interpreter, which has to be asked for before anything imports
Triton: test_triton_draws.py runs this file in a process of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.engine import step_graphs
from outrider.engine.drawing import Drawing
from outrider.engine.flat_inputs import fitting, flatten, recorded_shapes
from outrider.engine.group import Alone
from outrider.engine.kernel_drawing import KernelDrawing
from outrider.engine.recording import called_again
from outrider.engine.step_graphs import StepGraphs
from outrider.engine.step_inputs import Work
from outrider.engine.torch_drawing import TorchDrawing
from outrider.sampling import kernel_check, kernel_draws
from outrider.sampling.kernel_draws import Columns, Drawn, best, score, take
from outrider.sampling.noise import gumbel, row_key
from outrider.sampling.packed_rows import places_of
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Ranked, Row, TokenCounts, draw, rank
from outrider.sampling.triton_draws import TILE
from outrider.sampling.vocab_parallel import vocab_parallel

VOCAB = 2500  # three tiles, of which the last is not full
TEMPERATURES = (0.0, 1e-40, 1e-3, 0.3, 0.7, 1.0, 5.0)


def any_row(rng: random.Random, shaped: bool) -> Row:
    params = SamplingParams(temperature=rng.choice(TEMPERATURES), seed=rng.randrange(2**64))
    if not shaped:
        return Row(params, rng.randrange(10**6), None, ())
    params = SamplingParams(
        temperature=rng.choice(TEMPERATURES),
        top_k=rng.choice([0, 0, 1, 5, 40, VOCAB // 2, VOCAB, 10**9]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.3, 0.99, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 1.0]),
        presence_penalty=rng.choice([0.0, 0.0, 0.7, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.3]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.8]),
        logit_bias=rng.choice([{}, {3: 2.0, VOCAB - 1: 50.0, VOCAB // 2: -1.0}]),
        seed=rng.randrange(2**64),
    )
    history = TokenCounts(
        (rng.randrange(VOCAB + 5) for _ in range(rng.choice([3, 700]))), (rng.randrange(30) for _ in range(9))
    )
    mask = np.packbits(np.random.default_rng(rng.randrange(99)).random(VOCAB) < 0.3, bitorder="little")
    return Row(
        params,
        rng.randrange(10**6),
        history,
        [rng.choice([rng.randrange(30), rng.randrange(VOCAB)]) for _ in range(rng.choice([0, 2, 5]))],
        allowed=rng.choice([None, None, lambda: mask]),
    )


def logits_of(rng: random.Random, rows: int) -> torch.Tensor:
    """Some have many equal numbers."""
    generator = torch.Generator().manual_seed(rng.randrange(2**30))
    logits = torch.randn(rows, VOCAB, generator=generator) * rng.choice([0.1, 1.0, 3.0, 10.0])
    return rng.choice([logits, logits, (2 * logits).round() / 2])


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("seed", range(3))  # on a GPU there are forty
def test_the_tokens_are_those_of_a_cpu(seed: int, shaped: bool) -> None:
    rng = random.Random(seed)
    rows = [any_row(rng, shaped) for _ in range(6)]
    logits, limit = logits_of(rng, len(rows)), rng.choice([VOCAB, VOCAB - 7, 1200])
    before = logits.clone()
    assert kernel_draws.draw(logits, rows, limit).tolist() == draw(logits, rows, limit).tolist()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_the_ranks_are_those_of_a_cpu(seed: int, named: bool) -> None:
    rng = random.Random(seed)
    rows = [any_row(rng, shaped=index > 1) for index in range(6)]
    logits, limit = logits_of(rng, len(rows)), rng.choice([VOCAB, VOCAB - 7, 1200, 2])
    vocabulary = torch.tensor(sorted(rng.sample(range(VOCAB), 1300))) if named else None
    logits = logits[:, :1300] if named else logits
    expected = rank(logits, rows, 4, limit, vocabulary)
    found = kernel_draws.rank(logits, rows, 4, limit, vocabulary)
    for row, one, other in zip(rows, found, expected, strict=True):
        same(one if row.allowed is None else one.possible, other)


def same(found: Ranked, expected: Ranked) -> None:
    """Of equal ones a CPU tells any."""
    assert found.shares == pytest.approx(expected.shares, rel=1e-4, abs=1e-30)
    for place, share in enumerate(expected.shares[:-1]):
        if share > 0 and expected.shares.count(share) == 1:
            assert found.ids[place] == expected.ids[place]


def test_of_equals_the_lowest_ids_are_taken() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1, [2400, 60, 1100]] = 4.0
    logits[2] = -torch.inf
    logits[2, 1500] = -3.0
    greedy, noisy = SamplingParams(temperature=0.0), SamplingParams(seed=4)
    rows = [Row(greedy, 1, None, ())] * 2 + [Row(noisy, 1, None, ())] * 2
    assert kernel_draws.draw(logits, rows, VOCAB).tolist()[:3] == [0, 60, 1500]
    assert kernel_draws.rank(logits, rows, 3, VOCAB, None)[1].ids == (60, 1100, 2400)
    tied = SamplingParams(top_p=0.5)
    drawn = {
        int(token)
        for token in kernel_draws.draw(
            logits[:1, :TILE].expand(40, -1), [Row(tied, p, None, ()) for p in range(40)], 8
        )
    }
    assert drawn == {0, 1, 2, 3}, "half of the mass of eight equal ones"


def test_the_noise_is_that_of_noise_py() -> None:
    """To the bit: a key holds the number."""
    rows = [Row(SamplingParams(seed=2**64 - seed), seed, None, ()) for seed in range(1, 9)]
    told, logits = numbers(rows, range(8)), torch.zeros(8, VOCAB)
    columns = Columns(0, VOCAB, torch.tensor([VOCAB]))
    parts = torch.zeros(8, columns.tiles, dtype=torch.int64)
    take(logits, parts, columns)
    keys, _ = score(logits, parts, columns, Drawn(told[0], told[1], told[2].view(torch.float64)))
    noise = gumbel([row_key(row.params.seed, row.position) for row in rows], VOCAB)
    for tile, of_tile in enumerate(noise.split(TILE, dim=1)):
        best_of_tile = of_tile.max(1)
        assert best_of_tile.values.min() > 0  # then a float's bits are in the key as they are
        assert (keys[:, tile] >> 32).tolist() == best_of_tile.values.view(torch.int32).tolist()
        assert (2**31 - 1 - (keys[:, tile] & (2**31 - 1)) - tile * TILE).equal(best_of_tile.indices)


def test_a_drafted_token_is_penalized_once() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 9] = 1.0, 0.1
    row = Row(SamplingParams(temperature=0.0, frequency_penalty=0.4), 9, TokenCounts([8], [8]), [8])
    assert kernel_draws.draw(logits, [row], VOCAB).tolist() == draw(logits, [row]).tolist() == [8]


def test_a_row_has_the_same_token_and_shares_in_any_company() -> None:
    rng = random.Random(1)
    rows = [any_row(rng, shaped=index % 2 > 0) for index in range(7)]
    logits = logits_of(rng, len(rows))
    tokens, ranks = kernel_draws.draw(logits, rows, VOCAB), kernel_draws.rank(logits, rows, 4, VOCAB, None)
    for index, row in enumerate(rows):
        alone = logits[index : index + 1]
        assert kernel_draws.draw(alone, [row], VOCAB)[0] == tokens[index]
        assert kernel_draws.rank(alone, [row], 4, VOCAB, None) == [ranks[index]]


@pytest.mark.parametrize(("size", "limit"), [(2, VOCAB), (3, 700), (7, 1900)])
def test_slices_of_the_vocabulary_give_the_token_of_the_whole(size: int, limit: int) -> None:
    """As KernelDrawing does it in each of the ranks."""
    rng = random.Random(size)
    rows = [any_row(rng, shaped=False) for _ in range(8)]
    logits, drawn = logits_of(rng, len(rows)), numbers(rows, range(len(rows)))
    width, allowed = -(-VOCAB // size), torch.tensor([limit])
    parts = [logits[:, first : first + width].clone() for first in range(0, VOCAB, width)]
    columns = [Columns(index * width, part.shape[1], allowed) for index, part in enumerate(parts)]

    def merged(of_tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        found = torch.zeros(len(rows), len(parts), dtype=torch.int64)
        for index, tiles in enumerate(of_tiles):
            own = torch.zeros(len(rows), dtype=torch.int64)
            best(tiles, own, keys=True)
            found[:, index] = own
        return found

    tiles = [torch.zeros(len(rows), each.tiles, dtype=torch.int64) for each in columns]
    for part, keys, each in zip(parts, tiles, columns, strict=True):
        take(part, keys, each)
    most = merged(tiles)
    how = Drawn(drawn[0], drawn[1], drawn[2].view(torch.float64))
    scored = [score(part, most, each, how)[0] for part, each in zip(parts, columns, strict=True)]
    tokens = torch.zeros(len(rows), dtype=torch.int64)
    best(merged(scored), tokens)
    assert tokens.tolist() == draw(logits, rows, limit).tolist()


def numbers(rows: Sequence[Row], at: Sequence[int]) -> torch.Tensor:
    """As a recorded step has them."""
    out = np.zeros((3, len(rows)), np.int64)
    out[0] = at
    out[1] = np.array([row_key(r.params.seed, r.position) for r in rows], np.uint64).view(np.int64)
    out[2].view(np.float64)[:] = [
        0.0 if row.params.greedy else vocab_parallel(row).temperature for row in rows
    ]
    return torch.from_numpy(out)


@pytest.mark.parametrize("named", [False, True])
def test_recorded_steps_draw_the_same_with_kernels_and_without(named: bool) -> None:
    rng = random.Random(3)
    vocabulary = torch.tensor(sorted(rng.sample(range(2 * VOCAB), VOCAB))) if named else None
    ways: list[Drawing] = [
        way(Alone(VOCAB), 9, torch.device("cpu"), vocabulary) for way in (TorchDrawing, KernelDrawing)
    ]
    for limit in (5, 1300, VOCAB, 2 * VOCAB):
        given = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(limit)).half()
        rows = [any_row(rng, shaped=False) for _ in range(4)]
        told, greedy = numbers(rows, [3, 0, 5, 8]), numbers(rows, [1, 2, 3, 4])
        ranks = []
        for way in ways:
            way.limit.fill_(limit)
            way.take(given)
            way.draw(told)
            out = torch.zeros(4, 2, 4, dtype=torch.int32)
            way.rank(greedy, out)
            ranks.append(out)
        plain, kernels = ways
        assert torch.equal(plain.logits[:6], kernels.logits[:6])
        assert plain.tokens.tolist()[:6] == kernels.tokens.tolist()[:6]
        shares = [each[:, 1].contiguous().view(torch.float32) for each in ranks]
        assert torch.allclose(shares[0], shares[1], rtol=1e-4, atol=1e-30)
        for row in range(4):
            if shares[0][row, 0] > shares[0][row, 1]:  # of equal ones torch ranks any first
                assert ranks[0][row, 0, 0] == ranks[1][row, 0, 0]


@pytest.mark.parametrize("named", [False, True])
def test_recorded_draws_take_rows_that_ask_for_anything(named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(4)
    vocabulary = torch.tensor(sorted(rng.sample(range(2 * VOCAB), VOCAB))) if named else None
    logits = 3 * torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(step_graphs, "drawing_for", KernelDrawing)
    monkeypatch.setattr(step_graphs, "SIZES", (8,))
    graphs = StepGraphs(
        lambda inputs: logits[: inputs.input_ids.shape[1]],
        Alone(VOCAB),
        [shape for shape in recorded_shapes(8) if shape.tokens == 8],
        most_pages=2,
        block_size=16,
        scratch_block=9,
        device=torch.device("cpu"),
        vocabulary=vocabulary,
    )
    graphs.record(called_again, lambda _share: None)
    for limit in (1300, 2 * VOCAB):
        graphs.allow(limit)
        works = [Work([index], 0, [1, 2], 2) for index in range(3)]
        shape = fitting(graphs.shapes, works, 16)
        assert shape is not None
        step = flatten(works, shape, block_size=16, scratch_block=9)
        rows = [any_row(rng, shaped=True) for _ in range(5)]
        rows[1] = Row(SamplingParams(temperature=5.0, seed=3, top_p=0.99), 4, None, ())  # not the likeliest
        if not named:
            graphs.run(step)
            graphs.draw_whole(rows, [5, 0, 3, 1, 2], limit)
            expected = draw(logits[[5, 0, 3, 1, 2]], rows, limit).tolist()
            found = graphs.tokens(6)
            assert [found[at] for at in (5, 0, 3, 1, 2)] == expected
            assert found[4] == int(logits[4, :limit].argmax())
        graphs.run(step)
        best = graphs.rank_whole(rows, 3, limit)
        for one, other in zip(best, rank(logits[:5], rows, 3, limit, vocabulary), strict=True):
            same(one, other)


def test_kernels_that_draw_wrongly_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, named in ((199, False), (1500, True)):
        kernel_check.check(torch.device("cpu"), width, named)
    monkeypatch.setattr(
        kernel_draws, "draw", lambda logits, rows, limit: torch.zeros(len(rows), dtype=torch.int64)
    )
    with pytest.raises(RuntimeError, match="the kernels draw"):
        kernel_check.check(torch.device("cpu"), 199, named=False)


def test_ids_of_a_small_vocabulary_are_found() -> None:
    assert places_of(torch.tensor([1, 4])).tolist() == [-1, 0, -1, -1, 1]
