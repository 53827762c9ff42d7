"""The parts that an engine can be made of, by name: one line of configuration, refused where it makes no
sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from outrider.engine.attention_kernel import Kernel
from outrider.engine.linear_layers import Int4, Int8, Invariant, LinearLayers, Ordinary, Packed
from outrider.engine.recording import CudaGraphs, Record, called_again
from outrider.errors import StartupError

GATHERED = "gathered"
NATIVE = "native"
MEASURED = (NATIVE, GATHERED)  # attention of which it is measured whether it keeps bits
KERNELS = {  # of attention: each stands as KERNEL in a module of its own
    "varlen": "outrider.engine.varlen_attention",
    "triton": "outrider.engine.triton_attention",
    "reference": "outrider.engine.reference_attention",
}
CALLS = "calls"
RECORDS: dict[str, Callable[[torch.device], Record]] = {  # of the runners that repeat what they recorded
    "cuda-graphs": CudaGraphs,
    "called-again": lambda _device: called_again,  # for the tests
}
LINEARS: dict[str, LinearLayers] = {
    each.name: each
    for each in (
        Ordinary(),
        Packed(),
        Int8(),
        Int4(),
        Invariant("invariant", "TritonLinear", keeps_numbers=True),
        Invariant("int8-weights", "TritonInt8Linear", keeps_numbers=False),
        Invariant("fp8-weights", "TritonFp8Linear", keeps_numbers=False),
    )
}
ROUNDED = (Int8.name, Int4.name)
ON_GPU = {None: "invariant", "int8": "int8-weights", "fp8": "fp8-weights"}  # linear layers by --quantization


PACKED_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of; its group comes from the ranks that load it."""

    attention: tuple[str, ...] = (GATHERED,)  # the first that computes rightly here is taken
    runner: str = CALLS
    linears: str = "ordinary"
    fused: bool = False  # whether layers are compiled, if the compiler can


def usual(device: torch.device, dtype: torch.dtype | None, quantization: str | None = None) -> Parts:
    """Returns what is best on a device, for a model in this number format (None: not known yet)."""
    if device.type == "cuda":
        half = dtype != torch.float32 and find_spec("triton") is not None
        linears = ON_GPU[quantization] if half or quantization else "ordinary"
        return Parts(("triton", "varlen", GATHERED), "cuda-graphs", linears, fused=True)
    return Parts(MEASURED, linears=quantization or ("packed" if dtype in PACKED_DTYPES else "ordinary"))


def check_parts(parts: Parts, device: torch.device, dtype: torch.dtype | None, size: int) -> None:
    """Raises StartupError, in one sentence, where the parts do not go together on this device, in this number
    format (None: not known yet) and in so many processes."""
    reason = obstacle(parts, device, dtype, size)
    if reason is not None:
        raise StartupError(f"an engine cannot be made of these parts: {reason}")


def obstacle(parts: Parts, device: torch.device, dtype: torch.dtype | None, size: int) -> str | None:
    """Returns why not, as a phrase that says what to change."""
    for what, name, known in (
        *(("attention", name, (*MEASURED, *KERNELS)) for name in parts.attention or ("",)),
        ("runner", parts.runner, (CALLS, *RECORDS)),
        ("kind of linear layers", parts.linears, tuple(LINEARS)),
    ):
        if name not in known:
            return f"there is no {what} '{name}'; give one of {', '.join(known)}"
    if parts.runner == "cuda-graphs" and device.type != "cuda":
        return f"the runner cuda-graphs needs a GPU, and the device is {device.type}; give calls"
    if parts.runner != CALLS and parts.attention[0] in MEASURED:
        return (
            f"the runner {parts.runner} needs steps of few shapes, and what attention gathers differs from "
            f"step to step; give calls, or one of {', '.join(KERNELS)} first"
        )
    if parts.fused and parts.attention[0] in MEASURED:
        return (
            f"{parts.attention[0]} attention is for numbers that keep their bits, and compiled layers do "
            f"not; leave them as they are, or give one of {', '.join(KERNELS)} first"
        )
    if NATIVE in parts.attention and device.type != "cpu":
        return "native attention computes on a CPU; leave it out"
    if parts.linears in ON_GPU.values() and (device.type != "cuda" or dtype == torch.float32):
        return f"{parts.linears} linear layers compute in 16 bits on a GPU; give ordinary"
    if parts.linears == "packed" and (device.type != "cpu" or dtype not in (None, *PACKED_DTYPES)):
        return "packed linear layers compute in float32 or bfloat16 on a CPU; give ordinary"
    if parts.linears in ROUNDED and (device.type != "cpu" or dtype not in (None, torch.float32)):
        return f"{parts.linears} linear layers compute in float32 on a CPU; give ordinary"
    if parts.linears in ROUNDED and size > 1:
        return f"{parts.linears} linear layers are not divided among processes; give packed, or one process"
    return None


def kernels(names: tuple[str, ...]) -> list[Kernel]:
    """Returns those of these attention kernels that this installation has what they are made of."""
    return [found for name in names if name not in MEASURED and (found := _kernel(name)) is not None]


def _kernel(name: str) -> Kernel | None:
    try:
        found: Kernel = import_module(KERNELS[name]).KERNEL
    except ImportError:
        return None
    return found
