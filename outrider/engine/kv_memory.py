"""How much memory an engine's keys, values and recurrent states get: all of it is taken at the start."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.engine.attention import AttentionBackend
from outrider.engine.group import Group
from outrider.errors import StartupError
from outrider.options.memory import Share, memory_text
from outrider.wire.description import ModelInfo

BLOCKS_WITHOUT_KEYS = 2**16  # of a model whose layers all keep a state instead
MOST_STATES = 1024
LEAST_STATES = 4  # slots: for two sessions
LIBRARIES_BYTES = 2**29  # of a GPU, beside the pool: workspaces of libraries, code, recorded steps
ROW_BYTES = 16  # of each number of a row of logits: as the model gives it, in float32, and while it is drawn
ROWS = 512  # logits of a step


def with_all_blocks(
    few: AttentionBackend, info: ModelInfo, kv_memory: int | Share, device: torch.device, group: Group
) -> AttentionBackend:
    """Returns the backend with all of its blocks, taken now: a worker that has too little memory is not to
    become ready. The memory is that of all processes together; a share is of what each has, and as much as
    the one has that has least. Raises StartupError."""
    if isinstance(kv_memory, Share):
        total = group.least(kv_memory.of(_shared(info, device))) * group.size
        told = f"{kv_memory} of what is free, {memory_text(total)},"
    else:
        total, told = kv_memory, memory_text(kv_memory)
    bytes_per_block = few.pools.bytes_per_block * info.tensor_parallel_size
    for_blocks, num_states = total, 0
    if few.states is not None:
        bytes_per_slot = few.states.bytes_per_slot * info.tensor_parallel_size  # each process has all
        most = total // 2 // bytes_per_slot
        num_states = min(most, MOST_STATES)
        for_blocks -= num_states * bytes_per_slot
        if most < LEAST_STATES:
            least = 2 * LEAST_STATES * bytes_per_slot
            raise StartupError(
                f"a half of --kv-memory, {told} holds {most} of the recurrent "
                f"states of {info.name}, and {LEAST_STATES} are needed; give at least {-(-least // 1024)}KiB"
            )
    num_blocks = for_blocks // bytes_per_block if bytes_per_block else BLOCKS_WITHOUT_KEYS
    if num_blocks < 2:
        raise StartupError(
            f"--kv-memory of {told} holds {num_blocks} blocks of {info.name}; "
            f"give at least {-(-2 * bytes_per_block // 1024)}KiB"
        )
    wanted = f"there is no room for --kv-memory of {told} beside the model"
    if few.pools.on_cpu and num_blocks * few.pools.bytes_per_block > (free := free_bytes(device)):
        # The system would promise it, and end some process once it is written.
        raise StartupError(f"{wanted}: {memory_text(free)} are free; give less")
    try:
        return few.resized(num_blocks, num_states)
    except (MemoryError, torch.OutOfMemoryError):
        raise StartupError(f"{wanted}; give less") from None


def free_bytes(device: torch.device) -> float:
    """Returns the memory that can be had without taking any from others; infinite if the system does not
    tell."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what this process keeps for its next tensors
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return 1024 * next(
        (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf")
    )


def _shared(info: ModelInfo, device: torch.device) -> float:
    """Returns what of the free memory is divided: all but what steps take, at least a quarter."""
    free = free_bytes(device)
    if free == float("inf"):
        raise StartupError("this system does not tell how much memory is free; give --kv-memory as a size")
    return max(free - steps_bytes(info, device), free / 4)


def steps_bytes(info: ModelInfo, device: torch.device) -> int:
    """Returns the memory of a GPU that steps take beside weights and pool."""
    return LIBRARIES_BYTES + ROW_BYTES * ROWS * info.vocab_size if device.type == "cuda" else 0
