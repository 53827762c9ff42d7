"""The GPUs, and what a model would run by on a device: tried with the built-in draft model."""

from __future__ import annotations

import logging
from pathlib import Path

from demo import pair
from outrider.errors import OutriderError, in_one_line
from outrider.options.memory import memory_text
from outrider_cli.doctor.finding import Finding

DRIVER = Path("/proc/driver/nvidia/gpus")  # has a folder for each GPU that the driver knows
KV_BYTES = 2**25


def gpus(driver: Path = DRIVER) -> list[Finding]:
    """Returns a line for each that torch can use, or one for all."""
    import torch

    if torch.cuda.is_available():
        return [_gpu(number) for number in range(torch.cuda.device_count())]
    known = len(list(driver.iterdir())) if driver.is_dir() else 0
    if not known:
        return [Finding("gpu", "there is none: models run on the processor")]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return [
        Finding(
            "gpu",
            f"there are {known}, and torch {torch.__version__}, built {built}, can use none of them",
            "install a torch for CUDA that the driver knows (nvidia-smi tells its version), and look whether "
            "CUDA_VISIBLE_DEVICES hides them",
        )
    ]


def _gpu(number: int) -> Finding:
    import torch

    about = torch.cuda.get_device_properties(number)
    free, _ = torch.cuda.mem_get_info(number)
    said = f"{number}: {about.name}, {memory_text(free)} of {memory_text(about.total_memory)} free"
    if not built_for(about.major, about.minor, torch.cuda.get_arch_list()):
        todo = "install a torch that is built for it"
        return Finding("gpu", f"{said}; torch {torch.__version__} is not built for it", todo)
    return Finding("gpu", f"{said}, CUDA {torch.version.cuda}")


def built_for(major: int, minor: int, architectures: list[str]) -> bool:
    """Returns whether a torch that is built for these (sm_90, compute_90) runs on a GPU of this capability:
    by code for its own generation that is no newer, or by PTX, which is compiled for any that is newer.
    (docs.nvidia.com/cuda/cuda-compiler-driver-nvcc, "GPU Compilation")"""
    for name in architectures:
        kind, _, number = name.partition("_")
        digits = int("".join(filter(str.isdecimal, number)))
        theirs = divmod(digits, 10)
        same = theirs[0] == major and theirs[1] <= minor
        if (kind == "sm" and same) or (kind == "compute" and theirs <= (major, minor)):
            return True
    return False


def best() -> str:
    """Returns the device that models run on where none is named."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def engine(device: str, model: str = str(pair.DRAFT)) -> list[Finding]:
    """Returns what an engine is made of on the device, once it has shown that it gives what the model's own
    code gives; and a line for each part that was tried and is not used."""
    from outrider.engine.in_use import in_use
    from outrider.engine.loading import load_engine

    said = _Heard()
    logger = logging.getLogger("outrider.engine")
    logger.addHandler(said)
    try:
        made = load_engine(model, device=device, kv_memory_bytes=KV_BYTES)
    except OutriderError as error:
        return [Finding("engine", f"no model runs on {device}: {error.message}", "give another --device")]
    except Exception as error:  # whatever a driver or a kernel may raise
        why = f"no model runs on {device}: {in_one_line(error)}"
        return [Finding("engine", why, "look whether torch alone runs there")]
    finally:
        logger.removeHandler(said)
    exact = "bit-exact" if made.info.bit_exact else "not bit-exact"
    parts = f"{in_use(made)}, {made.info.dtype}, {exact}"
    todo = "install what it lacks: docs/gpu.md, or the lines above"
    slower = [Finding("engine", f"on {device}: {line}", todo) for line in said.lines]
    return slower or [Finding("engine", f"on {device}: {parts}")]


class _Heard(logging.Handler):
    """Keeps warnings: they say what is not used, and why."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
