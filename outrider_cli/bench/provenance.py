"""Says on what a figure was measured: which machine, and which versions."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("outrider", "torch", "transformers", "grpcio", "numpy")


def provenance() -> dict[str, object]:
    return {"machine": machine(), "versions": {name: version(name) for name in PACKAGES}}


def machine() -> str:
    """Returns the processor's name, if the system tells, and the number of cores."""
    try:
        told = dict(re.findall(r"(model name|cpu family|model)\s*: (.+)", Path("/proc/cpuinfo").read_text()))
    except OSError:
        told = {}
    name = told.get("model name", platform.machine())
    if "cpu family" in told and "model" in told:  # of one name there are fast ones and slow ones
        name += f" (family {told['cpu family']}, model {told['model']})"
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}"
