"""Keys that an indexer picks: which they are, that memory counts its own, and who does not pick."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch

from outrider.engine import indexer, picking
from outrider.engine.gathered_attention import BLOCK_SIZE
from outrider.engine.kv_pools import kernel_width
from outrider.engine.loading import load_engine
from outrider.engine.parts import Parts
from outrider.engine.picking import Blocks, highest, keeps_bits, scores
from tests.follower_pool import Pool, divided
from tests.zoo import serving
from tests.zoo.shapes import VOCAB
from tests.zoo.verdict import Outcome, build, verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek_v32")
    build("deepseek_v32", made)
    return made


def test_of_equal_scores_the_earliest_are_taken() -> None:
    found = torch.tensor([[1.0, 3.0, 1.0, -0.0, 1.0, 0.0, 9.0], [0.0, -0.0, 0.0, -1.0, 5.0, 9.0, 9.0]])
    seen = torch.arange(7) <= torch.tensor([[5], [4]])
    assert highest(found, seen, 3).tolist() == [
        [True, True, True, False, False, False, False],
        [True, True, False, False, True, False, False],
    ]


def test_all_are_taken_where_there_are_no_more() -> None:
    seen = torch.arange(6) <= torch.tensor([[2], [3], [4]])
    assert torch.equal(highest(torch.randn(3, 6), seen, 4)[:2], seen[:2])
    assert int(highest(torch.randn(3, 6), seen, 4)[2].sum()) == 4


def test_scores_are_sums_of_what_is_positive_and_are_computed_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, keys, weights = torch.randn(7, 3, 8), torch.randn(64, 8), torch.randn(7, 3)
    expected = torch.einsum("thk,th->tk", torch.einsum("thd,kd->thk", query, keys).relu(), weights)
    for most in (picking.MOST_PRODUCTS, 400):
        monkeypatch.setattr(picking, "MOST_PRODUCTS", most)
        assert torch.allclose(scores(query, keys, weights), expected, atol=1e-5)


def test_blocks_are_those_nearby_and_those_of_the_largest_products(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, size, most, near = 37, 5, 3, 1
    query, keys = torch.randn(tokens, 2, 8), torch.randn(tokens, 8)
    products, seen = torch.einsum("tgd,kd->gtk", query, keys), torch.ones(tokens, tokens).tril().bool()
    expected = torch.zeros_like(products, dtype=torch.bool)
    for group, token in product(range(2), range(tokens)):
        blocks = range(token // size + 1)
        of_blocks = products[group, token, : token + 1].split(size)
        best = [float(each.max()) for each in of_blocks]
        farther = sorted(blocks[:-near], key=lambda at: -best[at])[: most - near]
        for at in (*farther, *blocks[-near:]):
            expected[group, token, size * at : min(size * at + size, token + 1)] = True
    rule = Blocks(query, size, most, near)
    for most_products in (picking.MOST_PRODUCTS, 400):
        monkeypatch.setattr(picking, "MOST_PRODUCTS", most_products)
        assert torch.equal(rule.picked(slice(0, tokens), keys, seen), expected)
    assert rule.takes_all(15) and not rule.takes_all(16)


def test_a_row_whose_scores_depend_on_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert keeps_bits([(4, 16)])
    plain = picking.scores

    def leaning(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return plain(query, keys, weights) * (1 + 1e-6 * len(query))

    monkeypatch.setattr(picking, "scores", leaning)
    assert not keeps_bits([(4, 16)])


def test_memory_counts_the_keys_of_the_indexer(folder: Path) -> None:
    engine = load_engine(str(folder), kv_memory_bytes=2**24)
    config = engine.model.config
    heads, own = config.num_attention_heads, config.index_head_dim
    width = kernel_width(config.qk_head_dim) + kernel_width(config.v_head_dim)
    a_block = config.num_hidden_layers * BLOCK_SIZE * 4 * (heads * width + own)
    assert engine.attention.pools.bytes_per_block == a_block
    assert engine.pool.num_blocks == 2**24 // a_block


def test_an_attention_kernel_gives_way_to_gathered_keys(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine(
        str(folder), kv_memory_bytes=2**24, parts=Parts(("reference", "gathered"), linears="packed")
    )
    assert engine.attention.name == "gathered"
    assert "attention kernels see all keys, not those that an indexer picks" in caplog.text


def test_another_indexer_is_refused_by_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(indexer.OWN, "DeepseekV32Indexer")
    found = verdict("deepseek_v32", tmp_path)
    assert found.outcome is Outcome.REFUSED
    assert "its attention picks keys by an indexer of its own, which is not served here" in found.reason


def test_ranks_pick_the_same_keys(folder: Path) -> None:
    tokens, pool = [random.Random(4).randrange(VOCAB) for _ in range(serving.LENGTH)], Pool()
    alone = load_engine(str(folder), kv_memory_bytes=2**24)
    expected = serving.logits_of(alone, tokens, [len(tokens)], False, VOCAB)
    try:
        with divided(folder, 2, pool.start) as parts:
            whole = serving.logits_of(parts, tokens, [len(tokens)], False, VOCAB)
            assert float((whole - expected).abs().max()) < 1e-4 * float(expected.abs().max())
            assert serving.keeps_bits(parts, VOCAB)
    finally:
        pool.close()
