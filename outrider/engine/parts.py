"""The parts that an engine can be made of, by name."""

from __future__ import annotations

from importlib import import_module

from outrider.engine.paged_attention import Kernel

KERNELS = {  # of attention: each stands as KERNEL in a module of its own
    "varlen": "outrider.engine.varlen_attention",
    "triton": "outrider.engine.triton_attention",
    "reference": "outrider.engine.reference_attention",
}
ON_GPU = ("varlen", "triton")  # best kept first


def kernel(name: str) -> Kernel | None:
    """The attention kernel of that name; None where this installation lacks what it is made of."""
    try:
        found: Kernel = import_module(KERNELS[name]).KERNEL
    except ImportError:
        return None
    return found


def kernels() -> list[Kernel]:
    """What this installation has for a GPU."""
    return [found for name in ON_GPU if (found := kernel(name)) is not None]
