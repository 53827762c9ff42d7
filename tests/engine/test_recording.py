"""A capture that fails leaves nothing behind: steps run call by call then, as they would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider.engine.recording import CudaGraphs

POOL = (0, 7)


class FakeCuda:
    """The calls of CUDA that recording makes, as torch does them: ending a capture that was broken raises,
    and neither the stream nor the allocator is put back."""

    def __init__(self) -> None:
        self.stream: Any = Stream("usual")
        self.allocates_to: tuple[int, int] | None = None
        self.held = 0  # captures that hold the pool

    @contextmanager
    def graph(self, graph: object, *, pool: tuple[int, int], stream: Any, **_: object) -> Iterator[None]:
        usual, self.stream = self.stream, stream
        self.allocates_to, self.held = pool, self.held + 1
        try:
            yield
        except RuntimeError as broken:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            ) from broken
        self.stream, self.allocates_to = usual, None

    @contextmanager
    def with_stream(self, stream: Any) -> Iterator[None]:
        usual, self.stream = self.stream, stream
        yield
        self.stream = usual

    def end(self, index: int, pool: tuple[int, int]) -> None:
        if self.allocates_to != pool:
            raise RuntimeError("not currently recording to mempool_id")
        self.allocates_to = None

    def release(self, index: int, pool: tuple[int, int]) -> None:
        self.held -= 1


class Stream:
    def __init__(self, name: object) -> None:
        self.name = name

    def wait_stream(self, other: object) -> None:
        """Nothing runs."""


class Graph:
    def replay(self) -> None:
        """Nothing was recorded."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    @contextmanager
    def device(index: object) -> Iterator[None]:
        yield

    for name, value in {
        "graph_pool_handle": lambda: POOL,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "device": device,
        "current_device": lambda: 0,
        "current_stream": lambda: fake.stream,
        "set_stream": lambda stream: setattr(fake, "stream", stream),
        "stream": fake.with_stream,
        "graph": fake.graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", fake.end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", fake.release)
    return fake


def test_a_failed_capture_is_unwound(cuda: FakeCuda) -> None:
    usual, calls = cuda.stream, list[Any]()
    record = CudaGraphs(torch.device("cuda:0"))

    def function() -> None:
        calls.append(cuda.stream)
        if cuda.allocates_to is not None:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="previous error"):
        record(function)
    assert len(calls) == 3
    assert usual not in calls
    assert (cuda.stream, cuda.allocates_to, cuda.held) == (usual, None, 0)


def test_what_can_be_recorded_is(cuda: FakeCuda) -> None:
    usual = cuda.stream
    record = CudaGraphs(torch.device("cuda:0"))
    record(lambda: None)()
    assert (cuda.stream, cuda.allocates_to, cuda.held) == (usual, None, 1)


@pytest.mark.gpu
def test_a_gpu_works_on_after_a_failed_capture() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device = torch.device("cuda:0")
    numbers, usual = torch.zeros(1000, device=device), torch.cuda.current_stream()
    record = CudaGraphs(device)

    def waits() -> None:
        numbers.add_(1)
        numbers.sum().item()  # nothing can wait while it is recorded

    with pytest.raises(RuntimeError):
        record(waits)
    assert torch.cuda.current_stream() == usual
    assert not torch.cuda.is_current_stream_capturing()
    numbers.zero_()
    assert torch.ones(5, device=device).sum().item() == 5
    again = CudaGraphs(device)(lambda: numbers.add_(1) and None)
    again()
    assert numbers[0].item() == 3, "twice before it was recorded, and once again"
