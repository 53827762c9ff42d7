"""How a function is recorded so that it can be repeated: as a CUDA graph, or, for the tests, not at all."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Repeat = Callable[[], None]


class Record(Protocol):
    """Runs a function that takes and gives nothing, and returns what repeats it."""

    def __call__(self, function: Callable[[], None], /) -> Repeat: ...


def called_again(function: Callable[[], None], /) -> Repeat:
    """Returns a record that records nothing."""
    function()
    return function


class CudaGraphs:
    """Records as CUDA graphs, which share their working memory: one may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[], None], /) -> Repeat:
        with torch.cuda.device(self._device):
            return self._record(function)

    def _record(self, function: Callable[[], None]) -> Repeat:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(2):  # libraries settle what they allocate and choose
                function()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Another thread of the process may use the device meanwhile: its errors are its own.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                function()
        except BaseException:
            self._unwind(current)
            raise
        return graph.replay

    def _unwind(self, usual: torch.cuda.Stream) -> None:
        """Undoes what torch leaves where the end of a capture fails as well: all that this thread did from
        then on would go to the capture's stream, and what it allocated to the memory of recorded steps."""
        if torch.cuda.current_stream() == usual:
            return
        torch.cuda.set_stream(usual)
        index = torch.cuda.current_device()
        for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(RuntimeError):  # torch did it before it failed
                undo(index, self._pool)
