"""The processor: how much of it there is, and whether our own code runs on it."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from pathlib import Path

from outrider.engine import native
from outrider.errors import in_one_line
from outrider_cli.bench.provenance import machine
from outrider_cli.doctor.finding import Finding

QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container, by cgroup v2: microseconds of a period, and that
OURS = "x86_64"  # the machines that our own code is for
PLAIN = ("DEFAULT", "NO AVX")  # what torch calls a processor of whose vector units it uses none


def cores(quota: Path = QUOTA, seen: int | None = None) -> Finding:
    """`seen`: how many cores this process may run on."""
    count = len(os.sched_getaffinity(0)) if seen is None else seen
    allowed = _allowed(quota)
    said = f"{count} to run on: {machine().rpartition(', Python')[0]}"
    if allowed is None or allowed >= count:
        return Finding("cores", said)
    return Finding(
        "cores",
        f"{count} are seen, and the container may use {allowed:g} of them",
        f"give --threads {max(1, int(allowed))}, or the container as many as it sees: threads that are more "
        "wait for one another",
    )


def _allowed(quota: Path) -> float | None:
    try:
        most, period = quota.read_text().split()
        return None if most == "max" else int(most) / int(period)
    except (OSError, ValueError):
        return None


def vector_units() -> Finding:
    """What torch uses of them, and whether products in 8 bits are exact here."""
    import torch  # first: our own code uses its threads

    from outrider.engine.quantized import exact_here

    told = torch.backends.cpu.get_cpu_capability()
    if told in PLAIN and platform.machine() == OURS:
        said = f"torch uses none ({told})"
        todo = "take a machine with AVX2 or better, and leave ATEN_CPU_CAPABILITY out of the environment"
        return Finding("vector units", said, todo)
    exact = "exact in 8 bits" if exact_here() else "not exact in 8 bits: --quantization int8 is slower here"
    return Finding("vector units", f"{told}, {exact}")


def native_code() -> Finding:
    """Compiles it, unless that was done here before."""
    slower = "torch runs all of the model, which takes longer"
    if platform.machine() != OURS:
        return Finding("native code", f"it is for {OURS}, and this is {platform.machine()}: {slower}")
    if not native.suits():
        return Finding("native code", f"it is for processors with AVX2, on Linux: {slower}")
    try:
        made = native.compiled()
    except FileNotFoundError as error:
        return Finding("native code", f"{error}: {slower}", "install one (Debian: apt-get install g++)")
    except native.NotCompiled as error:
        said = f"it does not compile ({error}): {slower}"
        return Finding("native code", said, "install a g++ or clang++ that knows C++17")
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("native code", f"{in_one_line(error)}: {slower}", "make room for it, or time")
    try:
        ctypes.CDLL(str(made))
    except OSError as error:
        said = f"it cannot be loaded ({in_one_line(error)}): {slower}"
        return Finding("native code", said, f"delete {made}, so that it is compiled again")
    return Finding("native code", "it is compiled for this processor")
