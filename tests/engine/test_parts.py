"""What an engine can be made of: parts that go together, and those that are refused by a sentence."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.engine import kernel_bits, replayed, self_check
from outrider.engine.flat_inputs import Shape
from outrider.engine.loading import load_engine
from outrider.engine.native import library
from outrider.engine.parts import KERNELS, LINEARS, RECORDS, Parts, obstacle, usual
from outrider.engine.replayed import Replayed
from outrider.engine.self_check import kernels_keep_bits
from outrider.engine.step_graphs import StepGraphs
from outrider.engine.step_inputs import Work
from outrider.errors import StartupError
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts
from tests.exact.test_tensor_parallel import one_by_one, run, sessions

CPU, GPU = torch.device("cpu"), torch.device("cuda")
MOST_RECORDED = 64  # tokens of a step: recording steps of 512 takes half a minute here


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer steps run call by call."""
    monkeypatch.setattr(replayed, "SIZES", (MOST_RECORDED,))


@pytest.mark.parametrize(
    "parts",
    [
        Parts(("gathered",), "calls", "ordinary"),
        Parts(("native", "gathered"), "calls", "ordinary"),
        Parts(("reference",), "calls", "packed"),
        Parts(("reference",), "called-again", "ordinary"),
    ],  # recorded steps with packed weights: tests/exact/test_tensor_parallel.py
    ids=str,
)
def test_parts_that_go_together_give_the_same_tokens(parts: Parts, checkpoint: Callable[..., Path]) -> None:
    folder = str(checkpoint("llama"))
    expected = one_by_one(load_engine(folder, kv_memory_bytes=2**24))
    engine = load_engine(folder, kv_memory_bytes=2**24, parts=parts)
    if parts.attention[0] == "native" and library() is None:
        pytest.skip("nothing can be compiled here")
    assert engine.attention.name == parts.attention[0]
    assert engine.runner.name == ("calls" if parts.runner == "calls" else "replayed")
    assert engine.linears.name == parts.linears
    assert not engine.info.bit_exact, "nobody has measured it"
    assert run(engine, sessions(expected), random.Random(8)) == expected


def test_rows_are_compared_in_all_places_of_a_recorded_step(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called bit-exact, so its last row must be tried as well as its first."""
    monkeypatch.setattr(replayed, "SIZES", (128,))
    parts = Parts(("reference",), "called-again", "packed")
    engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**24, parts=parts)
    monkeypatch.setattr(engine.attention, "keeps_bits", lambda: True)
    assert isinstance(engine.runner, Replayed)
    assert kernels_keep_bits(engine)
    free, forward = engine.pool.available, engine.runner.graphs._forward

    def other_bits(*inputs: Any) -> torch.Tensor:
        logits = forward(*inputs).clone()
        logits[100:] *= 1.0001
        return logits

    monkeypatch.setattr(engine.runner.graphs, "_forward", other_bits)
    assert not kernels_keep_bits(engine)
    assert engine.pool.available == free
    tried = list[Shape]()
    monkeypatch.setattr(self_check, "_fills", lambda engine, shape, whole: tried.append(shape) or False)
    assert not kernels_keep_bits(engine)
    assert tried == list(engine.runner.shapes), "each on every rank of a group, or one waits for another"


def test_recorded_steps_that_give_other_logits_are_not_taken(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runs = StepGraphs.run

    def other(graphs: StepGraphs, step: Any) -> torch.Tensor:
        logits = runs(graphs, step).clone()
        logits[-1] = logits[-1].flip(0)
        return logits

    monkeypatch.setattr(StepGraphs, "run", other)
    parts = Parts(("reference",), "called-again", "packed")
    engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**24, parts=parts)
    assert engine.runner.name == "calls" and "steps run call by call, which is slower" in caplog.text


def test_tokens_are_ranked_in_recorded_steps_as_in_others(checkpoint: Callable[..., Path]) -> None:
    """A drafter's steps. What needs more than a temperature is ranked beside them."""
    folder, parts = str(checkpoint("llama")), Parts(("reference",), "called-again", "ordinary")
    engines = load_engine(folder, parts=parts), load_engine(folder)
    for top_p in (1.0, 0.7):
        drawn = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, seed=5, top_p=top_p))
        works = [Work([index], 0, [3 + 7 * index, 5, 8], 1) for index in range(len(drawn))]
        rows = [Row(params, 3, TokenCounts([5]), ()) for params in drawn]
        for limit in (199, 150):
            got, expected = (one.rank(one.prepare(works), rows, 4, limit) for one in engines)
            assert [each.ids for each in got] == [each.ids for each in expected]
            for one, same in zip(got, expected, strict=True):
                assert one.shares == pytest.approx(same.shares, abs=1e-4)


def test_layers_in_8_bits_run_by_a_kernel_in_recorded_steps(checkpoint: Callable[..., Path]) -> None:
    parts = Parts(("reference",), "called-again", "int8")
    engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**24, parts=parts)
    assert (engine.info.quantization, engine.runner.name) == ("int8", "replayed")
    assert len(run(engine, sessions(), random.Random(8))) == len(sessions())


def test_what_is_usual_goes_together() -> None:
    for device, dtype, size in (
        (CPU, torch.float32, 1),
        (CPU, torch.float32, 4),
        (CPU, torch.bfloat16, 1),
        (GPU, torch.bfloat16, 1),
        (GPU, None, 8),
    ):
        parts = usual(device, dtype)
        assert obstacle(parts, device, dtype, size) is None
        assert (parts.runner == "cuda-graphs") == (parts.attention[0] in KERNELS) == (device is GPU)
    assert usual(CPU, torch.float32).linears == "packed"
    assert usual(CPU, torch.float32, "int8").linears == "int8"


@pytest.mark.parametrize(
    ("parts", "device", "dtype", "size", "said"),
    [
        (
            Parts(("flash",)),
            CPU,
            torch.float32,
            1,
            "there is no attention 'flash'; give one of native, gathered",
        ),
        (Parts(()), CPU, torch.float32, 1, "there is no attention ''"),
        (Parts(runner="graphs"), CPU, torch.float32, 1, "there is no runner 'graphs'; give one of calls"),
        (
            Parts(linears="int2"),
            CPU,
            torch.float32,
            1,
            "there is no kind of linear layers 'int2'; give one of ordinary",
        ),
        (Parts(("reference",), "cuda-graphs"), CPU, torch.float32, 1, "needs a GPU, and the device is cpu"),
        (Parts(runner="cuda-graphs"), GPU, torch.bfloat16, 1, "give calls, or one of varlen, triton"),
        (Parts(("gathered", "reference"), "called-again"), CPU, None, 1, "differs from step to step"),
        (Parts(fused=True), GPU, torch.bfloat16, 1, "leave them as they are, or give one of varlen"),
        (Parts(linears="packed"), CPU, torch.float16, 1, "in float32 or bfloat16 on a CPU; give ordinary"),
        (Parts(linears="int8"), CPU, torch.bfloat16, 1, "in float32 on a CPU; give ordinary"),
        (Parts(("native", "gathered")), GPU, torch.bfloat16, 1, "native attention computes on a CPU"),
        (Parts(linears="int8"), GPU, None, 1, "in float32 on a CPU; give ordinary"),
        (Parts(linears="int8"), CPU, torch.float32, 2, "not divided among processes; give packed"),
    ],
)
def test_what_makes_no_sense_is_refused(
    parts: Parts, device: torch.device, dtype: torch.dtype | None, size: int, said: str
) -> None:
    assert said in (obstacle(parts, device, dtype, size) or "")


def test_a_refusal_is_a_sentence_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="an engine cannot be made of these parts: there is no runner"):
        load_engine(str(tmp_path / "nowhere"), parts=Parts(runner="graphs"))


def test_a_kernel_that_does_not_work_here_is_refused_unless_gathering_may_stand_in(
    checkpoint: Callable[..., Path],
) -> None:
    folder = str(checkpoint("llama"))
    with pytest.raises(StartupError, match=r"attention by varlen does not work for .* here; add gathered"):
        load_engine(folder, kv_memory_bytes=2**24, parts=Parts(("varlen",)))
    stands_in = load_engine(
        folder, kv_memory_bytes=2**24, parts=Parts(("varlen", "gathered"), linears="packed")
    )
    assert stands_in.attention.name == "gathered" and stands_in.info.bit_exact


KERNEL_FILE = """
from outrider.engine.attention_kernel import Kernel
from outrider.engine.reference_attention import reference_attention

calls = 0

def attention(*given):
    global calls
    calls += 1
    return reference_attention(*given)

KERNEL = Kernel("another", 8, attention, lambda how, dtype: None)
"""


def test_a_kernel_is_a_file_and_a_line(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(checkpoint("llama"))
    expected = one_by_one(load_engine(folder, kv_memory_bytes=2**24))
    (tmp_path / "another_attention.py").write_text(KERNEL_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(KERNELS, "another", "another_attention")
    monkeypatch.setattr(kernel_bits, "LENGTHS", (140, 70, 3))  # a trial of bits as long as it is for a GPU
    monkeypatch.setattr(kernel_bits, "CHUNKS", (130, 1, 5))  # takes half a minute here
    monkeypatch.setattr(kernel_bits, "WIDE", Shape(24, 8, 12))
    parts = Parts(("another",), "called-again", "packed")
    engine = load_engine(folder, kv_memory_bytes=2**24, parts=parts)
    assert (engine.attention.name, engine.pool.block_size) == ("another", 8)
    before = importlib.import_module("another_attention").calls
    assert run(engine, sessions(expected), random.Random(8)) == expected
    assert importlib.import_module("another_attention").calls > before


def test_every_part_is_known_by_its_name() -> None:
    assert {name: linears.name for name, linears in LINEARS.items()} == {name: name for name in LINEARS}
    assert set(RECORDS) == {"cuda-graphs", "called-again"}
