"""That memory comes to lie on huge pages, and keeps what is in it; and that steps take each other's room."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from outrider.engine.process_memory import HUGE, use_huge_pages
from tests.forked import said

SIZE = 32 * HUGE
SUPPORT = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_bytes() -> int:
    """Returns how many bytes of this process's memory lie on huge pages."""
    kilobytes = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert kilobytes is not None
    return int(kilobytes[1]) * 1024


def present_pages(memory: mmap.mmap) -> int:
    """Returns how many pages of `memory` are there, by Linux's own count."""
    first = ctypes.c_char.from_buffer(memory)
    start = ctypes.addressof(first) // mmap.PAGESIZE
    del first  # who holds it keeps the memory from being closed
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * start)
        entries = np.frombuffer(pages.read(8 * len(memory) // mmap.PAGESIZE), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63)))


def linux() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", Path("/proc/sys/kernel/osrelease").read_text())[:2])


@pytest.mark.skipif(
    not SUPPORT.is_file() or "[never]" in SUPPORT.read_text() or linux() < (6, 1),
    reason="needs Linux 6.1 with transparent huge pages",
)
def test_what_is_in_memory_is_moved_to_huge_pages() -> None:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.write(b"outrider" * (SIZE // 8))
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = huge_bytes()
        use_huge_pages()
        assert huge_bytes() - before >= SIZE - 2 * HUGE
        assert memory[:] == b"outrider" * (SIZE // 8)


@pytest.mark.skipif(not Path("/proc/self/pagemap").is_file(), reason="Linux tells which pages are there")
def test_room_that_is_free_is_not_taken_up_again() -> None:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.write(b"outrider" * (SIZE // 8))
        for start in range(0, SIZE, HUGE // 2):  # half of each huge page
            memory.madvise(mmap.MADV_DONTNEED, start, HUGE // 4)
        memory.madvise(mmap.MADV_HUGEPAGE)
        before = present_pages(memory)
        use_huge_pages()
        assert present_pages(memory) == before == SIZE // mmap.PAGESIZE // 2


def test_where_the_system_does_not_tell_all_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", missing)
    use_huge_pages()


PROGRAM = """
import resource, torch
from outrider.engine.process_memory import keep_freed_memory

keep_freed_memory()
for round in range(35):
    pieces = [torch.zeros(2**20) for _ in range(8)]  # 4 MiB each, which are free together
    del pieces
    if round == 4:  # by then all pieces have found places
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts Linux's page faults")
def test_memory_that_a_step_frees_is_the_next_ones() -> None:
    pages = 30 * 8 * 2**22 // mmap.PAGESIZE  # that would be new if all were given back
    assert int(said(("-c", PROGRAM))) < pages // 10


FREED = """
import torch
from pathlib import Path
from outrider.engine.process_memory import give_back_freed_memory, keep_freed_memory

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

keep_freed_memory()
kept, freed = [], []
for number in range(64):
    freed.append(torch.ones(2**20))
    kept.append(torch.ones(2**10))  # in between, so that what is freed is not the end of the heap
del freed
before = pages()
give_back_freed_memory()
print(before - pages())
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads Linux's count of pages")
def test_weights_that_were_replaced_are_given_back() -> None:
    assert int(said(("-c", FREED))) > 0.9 * 64 * 2**22 // mmap.PAGESIZE
