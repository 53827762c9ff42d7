"""Layers that run by native_products.cpp: right, and every row with its bits in any company."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from outrider.engine import native
from outrider.engine.loading import load_engine
from outrider.engine.native import library
from outrider.engine.native_layers import (
    NativeBlocksInt8Linear,
    NativeEvenInt8Linear,
    NativeInt4Linear,
    NativeInt8Linear,
    NativeLinear,
    run,
    run_gated,
)
from outrider.engine.norms import ShortNorm
from outrider.engine.plain_pass import NativeLayer

needs_compiler = pytest.mark.skipif(library() is None, reason="nothing can be compiled here")
FAR = {  # as a share of the length
    NativeLinear: 1e-5,
    NativeInt8Linear: 0.01,
    NativeEvenInt8Linear: 0.02,
    NativeInt4Linear: 0.09,
    NativeBlocksInt8Linear: 0.01,
}
KINDS = list(FAR)
PAUSE, FUTEX = 34, 202  # numbers of these calls to the system on x86-64
SHAPES = [(64, 64), (5, 7), (130, 1300), (192, 2049)]  # outputs and inputs


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@contextmanager
def threads(count: int) -> Iterator[None]:
    usual = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_right_and_a_row_has_its_bits_in_any_company(
    kind: type[NativeLinear], shape: tuple[int, int]
) -> None:
    out, width = shape
    weight, bias, x = random(out, width), random(out), random(130, width)
    layer = kind(weight, bias, [out - out // 3, out // 3])
    whole = layer(x)
    assert apart(whole, F.linear(x.double(), weight.double(), bias.double())) < FAR[kind]
    for first, count in ((0, 1), (1, 2), (3, 5), (8, 6), (14, 17), (31, 64), (60, 70)):
        rows = slice(first, first + count)
        assert torch.equal(layer(x[rows]), whole[rows])
    with threads(2):
        assert torch.equal(layer(x), whole) and torch.equal(layer(x[:1]), whole[:1])
    assert torch.equal(layer(x.view(2, 5, 13, width)), whole.view(2, 5, 13, out))
    assert layer(x[:0]).shape == (0, out)
    assert torch.equal(layer(torch.zeros(1, width))[0], bias)


@needs_compiler
@pytest.mark.parametrize("kind", [NativeInt8Linear, NativeEvenInt8Linear])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_whole_numbers_are_multiplied_exactly_whichever_instructions_a_processor_has(
    kind: type[NativeLinear], shape: tuple[int, int]
) -> None:
    out, width = shape
    generator, largest = torch.Generator().manual_seed(1), 127 if kind is NativeEvenInt8Linear else 32639
    weight = torch.randint(-127, 128, (out, width), generator=generator).double()
    whole = torch.randint(-largest, largest + 1, (70, width), generator=generator)
    weight[:, 0], whole[:, 1] = 127, largest  # so that all are rounded to themselves
    fine = (whole + 128) % 256 - 128
    coarse = (whole - fine) // 256
    expected = (fine.double() @ weight.T).float() + (coarse.double() @ weight.T).float() * 256
    layer = kind(weight.float(), None)
    for count in (1, 7, 16, 17, 40, 70):
        assert torch.equal(layer(whole[:count].float()), expected[:count])


@needs_compiler
@pytest.mark.parametrize("signs", [(1, 1), (1, -1), (-1, 1), (-1, -1)], ids=str)
@pytest.mark.parametrize("width", [1024, 2304])
def test_sums_of_the_largest_numbers_do_not_overflow(width: int, signs: tuple[int, int]) -> None:
    weight, x = torch.full((40, width), 127.0 * signs[0]), torch.full((7, width), 32639.0 * signs[1])
    expected = (x.double() @ weight.double().T).float()
    layer = NativeInt8Linear(weight, None)
    for count in (1, 3, 7):
        assert torch.equal(layer(x[:count]), expected[:count])


def helpers() -> list[Path]:
    """Returns where the system tells of each helper of steps."""
    found = [task for task in Path("/proc/self/task").iterdir() if "helper" in (task / "comm").read_text()]
    assert found
    return found


def sleep_all(tasks: list[Path]) -> None:
    """Returns once they sleep."""
    while not all((task / "syscall").read_text().startswith(f"{FUTEX} ") for task in tasks):
        time.sleep(0.001)


def times_asleep(task: Path) -> int:
    told = next(line for line in (task / "status").read_text().splitlines() if line.startswith("voluntary"))
    return int(told.split()[1])


@contextmanager
def kept_from_their_cores() -> Iterator[None]:
    """Stops the helpers of steps: a signal has each of them wait for another one."""
    libc, process = ctypes.CDLL(None), os.getpid()
    libc.signal.restype = ctypes.c_void_p
    libc.signal.argtypes = ctypes.c_int, ctypes.c_void_p

    def heeded(sign: signal.Signals, by: object) -> int | None:
        found: int | None = libc.signal(sign, ctypes.cast(by, ctypes.c_void_p))  # type: ignore[arg-type]
        return found

    tasks = helpers()
    before = heeded(signal.SIGUSR1, libc.pause), heeded(signal.SIGUSR2, libc.abs)
    pausing = f"{PAUSE} "
    try:
        for task in tasks:
            libc.tgkill(process, int(task.name), signal.SIGUSR1)
            while not (task / "syscall").read_text().startswith(pausing):
                time.sleep(0.001)
        yield
        assert all((task / "syscall").read_text().startswith(pausing) for task in tasks)
    finally:
        for task in tasks:
            libc.tgkill(process, int(task.name), signal.SIGUSR2)
        sleep_all(tasks)
        libc.signal(signal.SIGUSR1, before[0])
        libc.signal(signal.SIGUSR2, before[1])


@needs_compiler
def test_a_step_does_not_wait_for_a_thread_that_gets_no_core() -> None:
    layer, x = NativeLinear(random(640, 96), None), random(7, 96)
    with threads(2):
        whole = layer(x)
        with kept_from_their_cores():
            assert torch.equal(layer(x), whole)
        assert torch.equal(layer(x), whole)


@needs_compiler
def test_with_fewer_threads_the_other_helpers_sleep() -> None:
    layer, x = NativeLinear(random(640, 96), None), random(7, 96)
    with threads(4):
        layer(x)
    with threads(2):
        layer(x)
        sleep_all(tasks := helpers())
        before = [times_asleep(task) for task in tasks]
        for _ in range(20):
            layer(x)
            sleep_all(tasks)
    woken = sorted(times_asleep(task) - was for task, was in zip(tasks, before, strict=True))
    assert len(tasks) >= 3 and woken[-1] > 0
    assert all(times <= 2 for times in woken[:-1]), woken  # a system that stops a process wakes all, once


@needs_compiler
def test_where_no_more_threads_can_be_had_those_that_are_there_do_the_work() -> None:
    layer, x = NativeLinear(random(640, 96), None), random(7, 96)
    whole = layer(x)
    if (child := os.fork()) == 0:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + 2**25, taken + 2**25))  # room for a few stacks
        with threads(64):
            os._exit(not torch.equal(layer(x), whole))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_compiler
def test_several_threads_of_a_process_may_multiply_at_once() -> None:
    layer, x = NativeLinear(random(640, 96), None), random(7, 96)
    whole = layer(x)
    with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(2,)) as pool:
        assert all(torch.equal(found, whole) for found in pool.map(lambda _: layer(x), range(300)))


@needs_compiler
def test_a_child_of_a_process_with_helpers_has_its_own() -> None:
    layer, x = NativeLinear(random(640, 96), None), random(7, 96)
    with threads(2):
        whole = layer(x)
        for _ in range(40):
            if (child := os.fork()) == 0:
                os._exit(not torch.equal(layer(x), whole))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@needs_compiler
@pytest.mark.skipif("amx_int8" not in Path("/proc/cpuinfo").read_text(), reason="the processor has no tiles")
def test_tiles_give_the_same_sums_as_other_instructions() -> None:
    assert library().use_tiles()


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_does_the_norm_before_it_and_the_sum_behind_it(kind: type[NativeLinear]) -> None:
    weight, x, added = random(96, 200), random(9, 200) * 3, random(9, 96)
    norm = ShortNorm(torch.nn.Parameter(random(200), requires_grad=False), 1e-5)
    for weights in (norm.weight.data.clone(), torch.ones(200)):
        norm.weight.data.copy_(weights)
        expected = F.linear(norm(x), weight) + added
        assert apart(run(kind(weight, None).after(norm), x, added), expected) < FAR[kind]


@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_a_gated_mlp_is_right_and_a_row_has_its_bits_in_any_company(kind: type[NativeLinear]) -> None:
    gate, up, down, x = random(200, 96), random(200, 96), random(96, 200), random(90, 96)
    norm = ShortNorm(torch.nn.Parameter(torch.ones(96), requires_grad=False), 1e-5)
    joined, last = kind(torch.cat([gate, up]), None, [200, 200]), kind(down, None)
    both = joined.after(norm)
    whole = run_gated(both, last.layer, x)
    inner = F.silu(F.linear(norm(x), gate)) * F.linear(norm(x), up)
    assert apart(whole, x + F.linear(inner, down)) < 2 * FAR[kind]
    for first, count in ((0, 1), (1, 5), (6, 64), (20, 70)):
        rows = slice(first, first + count)
        assert torch.equal(run_gated(both, last.layer, x[rows]), whole[rows])


@needs_compiler
def test_large_numbers_of_both_signs_pass_a_gate_and_what_is_no_number_stays_in_its_row() -> None:
    one = NativeLinear(torch.eye(64).repeat(2, 1), None, [64, 64])
    last = NativeLinear(torch.eye(64), None)
    x = torch.linspace(-120, 120, 64 * 3).view(3, 64)
    assert torch.allclose(run_gated(one.layer, last.layer, x), x + F.silu(x) * x, rtol=1e-6, atol=1e-6)
    broken = x.clone()
    broken[1, 5] = float("nan")
    found = run_gated(one.layer, last.layer, broken)
    assert torch.equal(found[[0, 2]], run_gated(one.layer, last.layer, x)[[0, 2]])


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_without_a_compiler_torch_does_the_work(
    quantization: str | None, checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**22, quantization=quantization)
    assert engine.attention.name == "gathered" and engine.info.bit_exact and engine.attention.lay_out
    assert not any(isinstance(module, NativeLinear) for module in engine.model.modules())
    said = [record.getMessage() for record in caplog.records]
    assert (
        said[0] == "torch runs all of the model, which takes longer: FileNotFoundError: there is no compiler"
    )


@needs_compiler
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_a_usual_model_runs_by_it(quantization: str | None, checkpoint: Callable[..., Path]) -> None:
    engine = load_engine(str(checkpoint("llama")), kv_memory_bytes=2**22, quantization=quantization)
    assert engine.attention.name == "native" and engine.info.bit_exact and engine.attention.lay_out
    assert all(isinstance(layer, NativeLayer) for layer in engine.model.forward.layers)


@needs_compiler
def test_what_is_compiled_is_kept_where_nobody_else_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "one.cpp"
    source.write_text("int one() { return 1; }\n")
    monkeypatch.setattr(native, "SOURCES", [source])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "outrider"
    kept = native.compiled()
    assert kept.parent == folder and folder.stat().st_mode & 0o777 == 0o700
    assert native.compiled() == kept and len(list(folder.iterdir())) == 1
    folder.chmod(0o777)
    assert native._own_folder() != folder

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert native._own_folder().is_dir(), "a user that a cluster makes up has no home"


@needs_compiler
def test_what_a_compiler_has_against_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "one.cpp"
    source.write_text("this is no program\n")
    monkeypatch.setattr(native, "SOURCES", [source])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"torch runs all of the model, which takes longer: NotCompiled: {source}:1:")


@needs_compiler
def test_what_is_not_in_float32_or_not_contiguous_is_refused_before_it_is_read() -> None:
    layer = NativeLinear(random(64, 64), None)
    for x in (random(3, 64).to(torch.bfloat16), random(64, 3).T):
        with pytest.raises(TypeError, match="rows are contiguous and in float32"):
            run(layer.layer, x)
    with pytest.raises(TypeError, match="rows are contiguous and in float32"):
        layer(random(3, 64).double())
    with pytest.raises(TypeError, match="rows have 64 numbers, not 128"):
        layer(random(3, 128))
