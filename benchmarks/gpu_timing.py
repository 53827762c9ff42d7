"""Timing on a device: its ceilings, a kernel, a step. The parts of benchmarks/gpu.py that hold the clock."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch

from outrider.engine.attention import LayerAttention
from outrider.engine.attention_kernel import Kernel
from outrider.engine.engine import Engine, Work
from outrider.engine.flat_inputs import exact, flatten, on_device
from outrider.engine.parts import kernels, usual
from outrider.engine.recording import CudaGraphs
from outrider.engine.reference_attention import KERNEL as REFERENCE
from outrider.engine.replayed import Replayed
from outrider.sampling.sampler import Row

CACHE_BYTES = 2**28  # of keys and values among which a kernel's runs take turns, so that no cache holds them


@dataclass
class Budget:
    """The time that a run may take, and what was left out for it."""

    minutes: float
    began: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)

    @property
    def seconds_left(self) -> float:
        return 60 * self.minutes - (time.monotonic() - self.began)

    def allows(self, what: str, share: float = 1.0) -> bool:
        """Returns whether something may begin, of what may take this share of the time."""
        allowed = self.seconds_left > 60 * self.minutes * (1 - share)
        if not allowed:
            self.left_out.append(what)
        return allowed


@dataclass(frozen=True)
class About:
    """What was measured on."""

    name: str
    python: str
    torch: str
    transformers: str
    cuda: str | None


@dataclass(frozen=True)
class Device:
    """A GPU; or a CPU, for a dry run."""

    torch: torch.device

    @classmethod
    def named(cls, name: str) -> Device:
        """Returns the device. Raises SystemExit, in one sentence, if there is none of that name."""
        if name.startswith("cuda") and not torch.cuda.is_available():
            raise SystemExit(
                "there is no CUDA device here, or torch was built without CUDA; "
                "--device cpu makes a dry run with a tiny model"
            )
        try:
            device = torch.device(name)
        except RuntimeError:
            raise SystemExit(f"--device {name} is not a device; give cuda, cuda:N or cpu") from None
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        return cls(device)

    @property
    def is_gpu(self) -> bool:
        return self.torch.type == "cuda"

    def about(self) -> About:
        name = torch.cuda.get_device_name(self.torch) if self.is_gpu else platform.processor() or "CPU"
        versions = version("torch"), version("transformers")
        return About(name, platform.python_version(), *versions, torch.version.cuda)

    def forget(self) -> None:
        """Gives back the memory of what nobody holds any more."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def now(self) -> float:
        """Returns the seconds once everything that was asked of the device is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.torch)
        return time.perf_counter()

    def seconds(self, function: Callable[[], object], repeats: int) -> float:
        """Returns the median of single runs, between events of the device, after two to warm."""
        for _ in range(2):
            function()
        if not self.is_gpu:
            return statistics.median(self._timed(function) for _ in range(repeats))
        events = [
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2 * repeats)
        ]
        for begin, end in zip(events[::2], events[1::2], strict=True):
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize(self.torch)
        between: list[float] = [
            begin.elapsed_time(end) / 1e3 for begin, end in zip(events[::2], events[1::2], strict=True)
        ]
        return statistics.median(between)

    def _timed(self, function: Callable[[], object]) -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    def copy_bandwidth(self, size: int) -> float:
        """Returns the bytes a second, read and written, of a large copy."""
        source = torch.ones(size // 2, dtype=torch.bfloat16, device=self.torch)
        target = torch.empty_like(source)
        return 2 * size / self.seconds(lambda: target.copy_(source), 10)

    def matrix_rate(self, side: int) -> float:
        """Returns the operations a second of a large bfloat16 product of random numbers."""
        a, b = torch.randn(2, side, side, dtype=torch.bfloat16, device=self.torch)
        return 2 * side**3 / self.seconds(lambda: a @ b, 10)


def host_and_device_seconds(
    engine: Engine, works: Sequence[Work], rows: Sequence[Row], device: Device, repeats: int
) -> tuple[float, float]:
    """Returns the seconds of a step with building its inputs, drawing and fetching the tokens, and those that
    the device is busy: what it takes if steps are asked for without waiting for their tokens."""
    assert isinstance(engine.runner, Replayed)
    graphs = engine.runner.graphs
    for _ in range(2):
        engine.choose(engine.prepare(works), rows)
    single = []
    for _ in range(repeats):
        began = device.now()
        engine.choose(engine.prepare(works), rows)
        single.append(time.perf_counter() - began)
    step = engine.prepare(works).prepared
    began = device.now()
    for _ in range(repeats):
        graphs.run(step)
    busy = (device.now() - began) / repeats
    return statistics.median(single), busy


def attention_seconds(
    kernel: Kernel,
    device: Device,
    config: dict[str, int],
    sessions: int,
    tokens: int,
    context: int,
    repeats: int,
) -> tuple[float, int]:
    """Returns how long one layer's attention takes, and the bytes of keys and values that it has to read."""
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config["hidden_size"] // heads
    pages = -(-(context + tokens) // kernel.block_size)
    read = 4 * sessions * (context + tokens) * key_heads * width
    sets = max(1, min(16, CACHE_BYTES // read))
    blocks = sets * sessions * pages
    pool = (blocks + 1, kernel.block_size, key_heads, width)
    keys, values = (torch.randn(pool, dtype=torch.bfloat16, device=device.torch) for _ in range(2))
    query = torch.randn(sessions * tokens, heads, width, dtype=torch.bfloat16, device=device.torch)
    how = LayerAttention(heads, key_heads, width, width, None, width**-0.5, None)
    inputs = []
    for turn in range(sets):
        works = [
            Work(
                range((turn * sessions + s) * pages, (turn * sessions + s + 1) * pages),
                context,
                [0] * tokens,
                1,
            )
            for s in range(sessions)
        ]
        step = flatten(works, exact(works), block_size=kernel.block_size, scratch_block=blocks)
        inputs.append(on_device(step, device.torch))

    room: dict[Any, Any] = {}

    def all_sets() -> None:
        for one in inputs:
            kernel.attend(query, keys, values, one, how, None, room)

    with torch.inference_mode():
        # Recorded, since a kernel of some microseconds would wait for the host to ask for it.
        again = CudaGraphs(device.torch)(all_sets) if device.is_gpu else all_sets
        return device.seconds(again, repeats) / sets, read


def attention_cases(
    cases: Sequence[tuple[int, int, int]], config: dict[str, int], repeats: int, device: Device
) -> Iterator[dict[str, Any]]:
    """Yields how fast each kernel at hand is. `cases`: sessions, tokens of each, tokens in the cache."""
    for kernel in kernels(usual(device.torch, None).attention) if device.is_gpu else [REFERENCE]:
        for sessions, tokens, context in cases:
            case = {"kernel": kernel.name, "sessions": sessions, "tokens": tokens, "context": context}
            try:
                seconds, read = attention_seconds(kernel, device, config, sessions, tokens, context, repeats)
            except Exception as error:  # a kernel may not have been built for this device
                yield {**case, "error": str(error).splitlines()[0]}
                break
            yield {**case, "seconds": seconds, "bytes_per_second": read / seconds}
