"""How the system keeps a process's memory.

A step reads every weight, and looks up each page on its way; and it needs the same room as the step before.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

HUGE = 2**21  # bytes, on x86-64 and most others
PAGEMAP_BYTES = 8  # that Linux tells of each page
MADV_COLLAPSE = 25  # Linux 6.1 and later; gathers what is there, whatever the system does for new memory
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc
KEPT = 2**26  # bytes of freed memory that are not given back
LARGEST_KEPT = 2**25  # bytes of a piece of it


def keep_freed_memory() -> None:
    """Lets what a step frees be the next one's. glibc would give some megabytes back to the system each time,
    and every page of them would be cleared and looked up anew. Another C library stays as it is."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT)


def give_back_freed_memory() -> None:
    """Gives the system what was freed so far: weights as they were before they were packed or rounded.

    A GGUF file's parts refer to one another, so they are looked for. Another C library keeps what it has."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def use_huge_pages() -> None:
    """Moves what lies in memory of the process's own, in whole stretches of HUGE. Where the system cannot,
    all stays as it is; so does a stretch with room that is free, which a huge page would take up again."""
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in list(_own_stretches()):
        for address in _full(start, end):
            madvise(address, HUGE, MADV_COLLAPSE)  # refused for stacks and the like, and by older systems


def leave_files(tensors: Iterable[torch.Tensor]) -> None:
    """Copies those that lie in a file's pages into memory of the process's own.

    safetensors maps its file. Who overwrites that would change the weights of a model that runs, without a
    word, and who cuts it short would end its process (SIGBUS)."""
    files = list(_file_stretches())
    for tensor in tensors:
        own = getattr(tensor, "_local_tensor", tensor)  # of a rank, where a model is divided
        if any(start <= own.data_ptr() < end for start, end in files):
            own.data = own.data.clone()


def _file_stretches() -> Iterator[tuple[int, int]]:
    """Addresses of memory that a file lies behind; all there are, where the system does not tell."""
    try:
        lines = _lines()
    except OSError:
        lines = [f"0-{sys.maxsize:x} rw-p 0 0 1 all"]
    for line in lines:
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            start, end = (int(address, 16) for address in addresses.split("-"))
            yield start, end


def _own_stretches() -> Iterator[tuple[int, int]]:
    """Addresses of writable memory that no file lies behind, in whole huge pages."""
    try:
        lines = _lines()
    except OSError:
        return
    for line in lines:
        addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in addresses.split("-"))
        start, end = -(-start // HUGE) * HUGE, end // HUGE * HUGE
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]) and start < end:
            yield start, end


def _full(start: int, end: int) -> list[int]:
    """Returns the addresses from `start` to `end` of HUGE bytes each that all lie in memory."""
    try:
        with Path("/proc/self/pagemap").open("rb") as pages:  # a word for each page
            pages.seek(start // mmap.PAGESIZE * PAGEMAP_BYTES)
            words = np.frombuffer(pages.read((end - start) // mmap.PAGESIZE * PAGEMAP_BYTES), dtype=np.int64)
    except OSError:
        return []
    full = (words < 0).reshape(-1, HUGE // mmap.PAGESIZE).all(1)  # their highest bit
    return [start + HUGE * int(place) for place in np.flatnonzero(full)]


def _lines() -> list[str]:
    return Path("/proc/self/maps").read_text().splitlines()
