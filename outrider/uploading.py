"""Arrays of the host on the device. The host does not wait for the copy, or steps would begin later."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def uploaded(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns them on the device, for what is asked of it from now on; on a CPU the same memory."""
    tensor = torch.from_numpy(values)
    # From memory that the system may move, the host would have to copy it itself.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
