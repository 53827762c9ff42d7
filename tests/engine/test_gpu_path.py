"""The engine as it runs on a GPU, with all but the kernels and the recording: the same text and logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from outrider.engine import replayed
from outrider.engine.attention import LayerAttention
from outrider.engine.attention_kernel import Kernel
from outrider.engine.engine import Engine, Work
from outrider.engine.flat_inputs import (
    Shape,
    arrays,
    exact,
    fitting,
    flatten,
    on_device,
    recorded_shapes,
)
from outrider.engine.fusing import fused, unfuse
from outrider.engine.kernel_bits import kernel_keeps_bits
from outrider.engine.kernel_choice import with_kernel
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.parts import Parts, kernels
from outrider.engine.recording import Record, called_again
from outrider.engine.reference_attention import KERNEL as REFERENCE
from outrider.engine.reference_attention import reference_attention
from outrider.engine.replayed import Replayed
from outrider.engine.runner import CallByCall, Runner
from outrider.engine.self_check import Reference, reference
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw, rank

BLOCK = 16
VOCAB = 199


def paged(engine: Engine, num_blocks: int = 256) -> Engine:
    """A second engine on the same model."""
    return Engine(engine.model, engine.info, PagedAttention.on(engine.model, num_blocks, REFERENCE))


def record(engine: Engine, how: Record, most_tokens: int) -> Runner:
    assert isinstance(engine.runner, CallByCall)
    return replayed.recorded(engine.runner, engine.info, how, lambda _share: None, most_tokens)


def recorded(engine: Engine, num_blocks: int = 256, most_tokens: int = 128) -> Engine:
    made = paged(engine, num_blocks)
    made.runner = record(made, called_again, most_tokens)
    assert made.runner.name == "replayed"
    return made


def works_of(counts: Sequence[tuple[int, int]], block_size: int = BLOCK) -> list[Work]:
    """(start, tokens) of each; blocks in a random order."""
    rng = random.Random(1)
    blocks = list(range(400))
    rng.shuffle(blocks)
    return [
        Work(
            [blocks.pop() for _ in range(-(-(start + count) // block_size))],
            start,
            [rng.randrange(VOCAB) for _ in range(count)],
            min(count, 5),
        )
        for start, count in counts
    ]


def test_a_step_fills_the_first_shape_that_holds_it() -> None:
    shapes = recorded_shapes()
    assert [fitting(shapes, works_of([(9, 1)] * n), BLOCK) for n in (1, 3, 128)] == [
        Shape(1, 1, 1),
        Shape(4, 4, 4),
        Shape(128, 128, 16),
    ]
    drafts = fitting(shapes, works_of([(9, 5)] * 7), BLOCK)
    assert drafts == Shape(64, 64, 16)
    reading = fitting(shapes, works_of([(9, 1)] * 20 + [(0, 80)]), BLOCK)
    assert reading == Shape(128, 128, 128)
    assert fitting(shapes, works_of([(0, 300), (9, 1)]), BLOCK) == Shape(384, 256, 384)
    assert fitting(shapes, works_of([(0, 513)]), BLOCK) is None
    assert fitting(shapes, works_of([(0, 20)]), BLOCK) == Shape(32, 32, 32)
    assert fitting(shapes, works_of([(9, 1)] * 260 + [(0, 40)]), BLOCK) is None  # too many to read beside


@pytest.mark.parametrize("shape", [None, Shape(64, 64, 17), Shape(192, 64, 192)])
def test_the_arrays_say_what_the_works_say(shape: Shape | None) -> None:
    works = works_of([(0, 1), (37, 5), (16, 17), (250, 2)])
    step = flatten(works, shape or exact(works), block_size=BLOCK, scratch_block=999)
    found = arrays(step.buffer, step.shape, step.pages, np.int64, np.int32)
    first = 0
    for index, work in enumerate(works):
        run = slice(first, first + len(work.tokens))
        first += len(work.tokens)
        positions = np.arange(work.start, work.start + len(work.tokens))
        assert found.ids[run].tolist() == list(work.tokens)
        assert found.positions[run].tolist() == positions.tolist()
        assert found.slots[run].tolist() == [work.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in positions]
        assert found.query_ends[index : index + 2].tolist() == [run.start, run.stop]
        assert found.keys[index] == work.start + len(work.tokens)
        assert found.tables[index, : len(work.blocks)].tolist() == list(work.blocks)
    assert step.rows == 1 + 5 + 5 + 2
    assert found.keep[: step.rows].tolist() == [0, 1, 2, 3, 4, 5, 18, 19, 20, 21, 22, 23, 24]
    assert set(found.slots[first:] // BLOCK) <= {999}, "what fills up writes to the scratch block alone"
    assert found.query_ends[-1] == step.shape.tokens
    lengths = np.diff(found.query_ends)
    assert lengths.max() <= step.shape.longest
    assert (found.keys >= lengths).all() and (lengths[len(works) :] <= BLOCK).all()
    assert np.diff(found.key_ends).tolist() == found.keys.tolist()


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen3", "gpt2", "opt", "mixtral"])
@pytest.mark.parametrize("make", [paged, recorded])
def test_logits_are_those_of_the_ordinary_engine(
    arch: str, make: Callable[[Engine], Engine], engine: Callable[..., Engine]
) -> None:
    """Several sessions, in chunks, with drafts that are taken back, with and without filling up."""
    plain = engine(arch)
    other = make(plain)
    rng = random.Random(4)
    texts = [[rng.randrange(VOCAB) for _ in range(450)] for _ in range(3)]
    tables = {id(one): [BlockTable() for _ in texts] for one in (plain, other)}
    largest = 0.0
    for step in range(12):
        parts = []
        for index in range(len(texts)):
            done = tables[id(plain)][index].length
            parts.append(
                (index, done, rng.choice((1, 1, 2, 5, 30) if step else (40, 7, 1)), rng.randrange(4))
            )
        found = []
        for one in (plain, other):
            works = []
            for index, start, count, drafts in parts:
                table = tables[id(one)][index]
                tokens = [*texts[index][start : start + count], *range(drafts)]
                one.pool.extend(table, len(tokens))
                works.append(Work(table.blocks, start, tokens, count))
            found.append(one.step(works).clone())
            for index, start, count, _ in parts:
                one.pool.truncate(tables[id(one)][index], start + count)
        assert found[0].shape == found[1].shape
        largest = max(largest, float(found[0].abs().max()))
        assert float((found[0] - found[1]).abs().max()) < 1e-4 * largest


def greedy(**changes: float) -> SamplingParams:
    return SamplingParams(temperature=0.0, **changes)  # type: ignore[arg-type]


def test_tokens_are_those_that_draw_gives(engine: Callable[..., Engine]) -> None:
    """Greedy and noisy rows on recorded steps, and transforms beside them; ids of a smaller vocabulary."""
    plain = engine("llama")
    other = recorded(plain)
    kinds = [
        greedy(),
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=1.3, seed=6, top_p=0.7),
        greedy(repetition_penalty=1.4),
        SamplingParams(temperature=1.0, seed=2**64 - 3),
        SamplingParams(temperature=0.5, seed=9),
    ]
    prompts = [[3 + 7 * i, 5, 60 + i, 8] for i in range(len(kinds))]
    for limit in (VOCAB, 150, None):
        works, rows = [], []
        for index, (params, prompt) in enumerate(zip(kinds, prompts, strict=True)):
            works.append(Work([index], 0, prompt, 2))
            history = TokenCounts(prompt)
            rows += [Row(params, 3, history, ()), Row(params, 4, history, (7,))]
        inputs = other.prepare(works)
        assert inputs.prepared.shape in recorded_shapes() and inputs.prepared.shape.tokens > 20
        chosen = other.choose(inputs, rows, limit)
        expected = draw(plain.step(works), rows, limit).tolist()
        assert chosen == expected
        assert all(token < (limit or VOCAB) for token in chosen)
    other.choose(other.prepare(works), rows, 150)
    assert other.step(works).isfinite().all(), "a limit is for the step that it was given for"


def test_nothing_is_drawn_where_no_row_is_wanted(engine: Callable[..., Engine]) -> None:
    other = recorded(engine("llama"))
    assert other.choose(other.prepare([Work([0, 1], 0, [1] * 20, 0)]), []) == []
    other.probe()


def test_what_was_not_recorded_runs_call_by_call(engine: Callable[..., Engine]) -> None:
    plain = engine("llama")
    other = recorded(plain, most_tokens=4)
    work = Work([0, 1], 0, [1, 2, 3, 4, 5], 5)
    assert other.prepare([work]).prepared.shape not in recorded_shapes(4)
    row = Row(greedy(), 5, None, ())
    assert other.choose(other.prepare([work]), [row] * 5) == plain.step([work]).argmax(-1).tolist()


def test_a_model_that_cannot_be_recorded_runs_call_by_call(
    engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(function: Callable[[], None], /) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    other = paged(engine("llama"))
    assert record(other, refuses, 4) is other.runner
    [said] = caplog.records
    assert "call by call" in said.message and "capturing" in said.message
    assert "\n" not in said.message
    assert other.choose(other.prepare([Work([0], 0, [1], 1)]), [Row(greedy(), 1, None, ())])


def test_fused_layers_give_the_same_logits(half: Callable[[str], tuple[Engine, Reference]]) -> None:
    """Compiled once for all layers and all numbers of tokens but one; here without making code of it."""
    running, expected = half("llama")
    other = paged(running)
    works = [Work([0, 1, 2], 0, list(range(40)), 3), Work([40], 0, [4, 5], 2)]
    before = other.step(works).clone()
    counters.clear()
    try:
        assert fused(other, expected, "eager")
        compiled = []
        for tokens in (30, 7, 1, 12, 3, 1, 40):
            other.step([Work([0, 1, 2], 0, [1] * tokens, 1)])
            compiled.append(counters["stats"]["unique_graphs"])
        assert compiled[2] == compiled[-1] > 0
        assert torch.equal(other.step(works), before)
        assert not fused(other, replace(expected, logits=expected.logits + 100.0), "eager"), (
            "logits that are wrong are noticed"
        )
    finally:
        unfuse(other.model)
        torch._dynamo.reset()


def test_copied_blocks_hold_the_same_keys(engine: Callable[..., Engine]) -> None:
    other = recorded(engine("llama"))
    first = other.step([Work([0], 0, [5, 6, 7], 1)]).clone()
    other.step([Work([1], 0, [9, 9, 9], 1)])
    other.copy_blocks([(0, 1)])
    row = [Work([0], 3, [8], 1)], [Work([1], 3, [8], 1)]
    assert torch.equal(other.step(row[0]).clone(), other.step(row[1]))
    assert not torch.equal(first, other.step(row[0]))


def wrong_attention(query: torch.Tensor, *others: object) -> torch.Tensor:
    return query


@pytest.fixture
def half(checkpoint: Callable[..., Path]) -> Callable[[str], tuple[Engine, Reference]]:
    """A bfloat16 engine with the model's own linear layers, as on a GPU; the logits of the model's own
    code."""

    def load(arch: str) -> tuple[Engine, Reference]:
        folder = checkpoint(arch)
        running = load_engine(str(folder), dtype="bfloat16", kv_memory_bytes=2**24, parts=Parts())
        running.model.set_attn_implementation("eager")
        return running, reference(running.model, running.info)

    return load


def test_the_first_kernel_that_computes_right_is_taken(
    half: Callable[[str], tuple[Engine, Reference]], caplog: pytest.LogCaptureFixture
) -> None:
    running, expected = half("llama")
    running.step([Work([0], 0, [1], 1)])
    found = with_kernel(running, expected, [Kernel("wrong", 16, wrong_attention), REFERENCE])
    assert found.attention.name == "reference"
    [said] = caplog.records
    assert "wrong attention kernel" in said.message
    assert with_kernel(running, expected, []) is running


def test_a_model_whose_layers_no_kernel_can_do_gathers_its_keys(
    half: Callable[[str], tuple[Engine, Reference]], caplog: pytest.LogCaptureFixture
) -> None:
    running, expected = half("gemma2")
    running.step([Work([0], 0, [1], 1)])
    assert with_kernel(running, expected, [Kernel("bare", 16, wrong_attention)]) is running
    assert [record.message for record in caplog.records] == [
        "attention gathers keys, which is slower: attention kernels cannot be used: they cap no scores"
    ]


def test_what_a_kernel_cannot_do_is_said(engine: Callable[..., Engine]) -> None:
    for arch, dtype, reason in (
        ("llama", torch.bfloat16, None),
        ("llama", torch.float32, "16 bits"),
        ("gemma2", torch.bfloat16, "cap no scores"),
    ):
        how = next(iter(engine(arch).attention.layers.values()), None)
        if how is None:
            running = engine(arch)
            running.step([Work([0], 0, [1], 1)])
            how = running.attention.layers[0]
        said = Kernel("any", 16, wrong_attention).refusal(how, dtype)
        assert said is None if reason is None else reason in (said or "")


PLAIN = LayerAttention(4, 2, 64, 64, None, 0.125, None)
ASKED = (  # of kernels, by layers
    PLAIN,
    replace(PLAIN, window=5),
    LayerAttention(8, 1, 128, 128, 40, 0.1, None),
    LayerAttention(24, 1, 80, 80, None, 0.1, None),
    LayerAttention(4, 2, 256, 256, 40, 0.06, 5.0),
    replace(PLAIN, chunk=16),
    replace(PLAIN, sinks=True),
    replace(PLAIN, value_width=32),
)


def apart(kernel: Kernel, how: LayerAttention, dtype: torch.dtype) -> float:
    """The largest difference from plain torch on a GPU, over runs of several kinds."""
    torch.manual_seed(0)
    size = kernel.block_size
    works = works_of([(0, 1), (37, 5), (15, 1), (16, 17), (0, 33), (5000, 2)], size)
    step = flatten(works, Shape(80, 20, 40), block_size=size, scratch_block=400)
    inputs = on_device(step, torch.device("cuda"))
    query = torch.randn(80, how.query_heads, how.width, dtype=dtype, device="cuda")
    pool = 401, size, how.key_heads
    keys = torch.randn(*pool, how.width, dtype=dtype, device="cuda")
    values = torch.randn(*pool, how.value_width, dtype=dtype, device="cuda")
    sinks = torch.randn(how.query_heads, device="cuda") if how.sinks else None
    pools = keys.float(), values.float()
    expected = reference_attention(query.float(), *pools, inputs, how, sinks, {})
    found = kernel.attend(query, keys, values, inputs, how, sinks, {})
    return float((found - expected).abs().max())


@pytest.mark.gpu
def test_kernels_on_a_gpu_compute_the_same() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    found = kernels(("varlen", "triton"))
    assert found
    for kernel in found:
        for how in ASKED:
            if kernel.refusal(how, torch.bfloat16) is None:
                assert apart(kernel, how, torch.bfloat16) < 0.05, (kernel.name, how)
        assert apart(kernel, PLAIN, torch.float16) < 0.01, kernel.name


@pytest.mark.gpu
def test_a_kernel_on_a_gpu_gives_a_row_the_same_bits_in_any_company() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    [kernel] = kernels(("triton",))
    assert kernel_keeps_bits(kernel, ASKED[:2], torch.bfloat16, torch.device("cuda"))
    assert kernel_keeps_bits(kernel, ASKED[:1], torch.float32, torch.device("cuda"))


@pytest.mark.gpu
def test_recorded_steps_on_a_gpu_give_what_steps_call_by_call_give(checkpoint: Callable[..., Path]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    running = load_engine(str(checkpoint("llama")), device="cuda", dtype="bfloat16", kv_memory_bytes=2**26)
    again = running.runner
    assert isinstance(again, Replayed)
    works = [Work([index], 0, [3 + index, 5, 60], 3) for index in range(5)]
    kinds = (
        greedy(),
        SamplingParams(temperature=0.8, seed=5),
        SamplingParams(temperature=1.1, seed=6, top_p=0.8, top_k=30),
        greedy(repetition_penalty=1.4),
    )
    rows = [Row(kinds[index % 4], 1 + index % 3, TokenCounts([3, 5]), ()) for index in range(15)]
    logits = running.step(works).clone()
    running.runner = again.calls
    assert float((running.step(works) - logits).abs().max()) < 0.05 * float(logits.abs().max())
    running.runner = again
    logits = logits.cpu()
    assert running.choose(running.prepare(works), rows) == draw(logits, rows).tolist()
    for some in (rows, [row for row in rows if not row.params.cut and not row.params.penalized]):
        step = running.prepare(
            [Work([index], 0, [3 + index, 5, 60], 3) for index in range(5)][: len(some) // 3]
        )
        ranked = running.rank(step, some[: 3 * (len(some) // 3)], 3)
        expected = rank(running.step(works).cpu()[: len(ranked)], some[: len(ranked)], 3)
        assert [each.ids[0] for each in ranked] == [each.ids[0] for each in expected]
