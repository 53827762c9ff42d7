"""Our code in C++, native_*.cpp, compiled for the processor at hand when it is first needed.

Where that cannot be done, torch does the work: see packed.py, quantized.py and gathered_attention.py. A row
keeps its bits in any company by either, but they are not the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from outrider.errors import in_one_line

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("native*.cpp"))
HEADERS = sorted(HERE.glob("native*.h"))
COMPILERS = ("g++", "clang++")
# A product and a sum are one operation wherever they stand: clang++ would round some sums of branches twice.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-pthread", "-fno-math-errno", "-ffp-contract=fast"),
    *("-shared", "-fPIC"),
)
NEEDED = {"avx2", "fma", "f16c"}  # instructions, as Linux calls them
SECONDS = 300.0  # that compiling may take: on an idle machine it takes two


class NotCompiled(subprocess.SubprocessError):
    """The compiler did not take our code: the first line of what it said."""


def pointers(*names: str) -> tuple[tuple[str, type[ctypes.c_void_p]], ...]:
    """Returns fields of a structure."""
    return tuple((name, ctypes.c_void_p) for name in names)


@cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled library; None where it cannot be had, which is logged once."""
    if not suits():
        return None
    try:
        found = ctypes.CDLL(str(compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("torch runs all of the model, which takes longer: %s", in_one_line(error))
        return None
    layer, numbers, count, threads = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    step, heads, given = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p
    found.linear.argtypes = (layer, numbers, count, numbers, numbers, threads)
    found.gated.argtypes = (layer, layer, numbers, count, numbers, threads)
    found.attend.argtypes = (step, heads, given, given, given, ctypes.c_void_p, numbers, threads)
    found.move_slots.argtypes = (heads, ctypes.c_void_p)
    found.decode.argtypes = (
        layer,
        heads,
        step,
        ctypes.c_void_p,
        *(numbers,) * 4,
        count,
        *(numbers,) * 2,
        threads,
    )
    of_rows = (ctypes.c_void_p,) * 2
    found.guess.argtypes = (layer, *of_rows, count, given, count, ctypes.c_double, *of_rows, threads)
    found.guess.restype = count
    found.carry_mamba2.argtypes = (*(numbers,) * 7, *(count,) * 4, threads)
    found.carry_gated_delta.argtypes = (*(numbers,) * 7, *(count,) * 5, threads)
    found.use_tiles()
    return found


def suits() -> bool:
    """Returns whether it is written for this processor."""
    try:
        return platform.machine() == "x86_64" and any({*line.split()} >= NEEDED for line in _processor())
    except OSError:  # another system than Linux
        return False


def multiplies_bytes() -> bool:
    """Returns whether the processor has instructions that multiply and add bytes (VNNI)."""
    return any("avx512_vnni" in line.split() for line in _processor())


def loaded() -> ctypes.CDLL:
    """Returns the library where something was made that only runs by it."""
    found = library()
    assert found is not None
    return found


def compiled() -> Path:
    """Returns the library's file, kept in the user's cache for each processor, compiler and source."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise FileNotFoundError(f"there is no {' or '.join(COMPILERS)}")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=SECONDS).stdout
    hashed = hashlib.sha256(version)
    for source in (*HEADERS, *SOURCES):
        hashed.update(source.read_bytes())
    hashed.update("\n".join([*FLAGS, *_processor()]).encode())
    name = f"native-{hashed.hexdigest()[:16]}.so"
    folder = _own_folder()
    if not (folder / name).exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:  # several processes may do this at once
            made = Path(scratch) / name
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, timeout=SECONDS)
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().partition("\n")[0]
                raise NotCompiled(said or f"{compiler} ended with {done.returncode}")
            made.replace(folder / name)
    return folder / name


def _processor() -> list[str]:
    """Returns the lines that tell which it is and what it can do, as Linux writes them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return [line for line in lines if line.startswith(("model name", "flags"))][:2]


def _own_folder() -> Path:
    """Returns a folder that nobody else may write to: what lies there is run."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # this for a user without a home, as some clusters have
        pass
    return Path(tempfile.mkdtemp(prefix="outrider-"))
