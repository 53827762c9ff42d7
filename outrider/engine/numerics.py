"""Which numbers an engine computes: a name that two engines share if they give the same logits to the bit.

One checkpoint gives other logits in another number format, on another kind of processor, or divided among
another number of processes: by rounding, which may change a token where two are nearly equal.
"""

from __future__ import annotations

import hashlib
import random

import torch

from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable

CHUNKS = (17, 1, 1, 3)  # tokens of the probe in a step, which fit into the least KV pool
DIGITS = 12


def numerics(engine: Engine) -> str:
    """Returns the name: number format, quantization, processes, and the hash of a fixed probe's logits.

    Every process of a group calls it. The engine is as it serves; it holds no session."""
    info, hashed = engine.info, hashlib.sha256()
    rng, table = random.Random(31), BlockTable()
    tokens = [rng.randrange(info.vocab_size) for _ in range(sum(CHUNKS))]
    try:
        for chunk in CHUNKS:
            start = table.length
            engine.pool.extend(table, chunk)
            logits = engine.step([Work(table.blocks, start, tokens[start : start + chunk], chunk)])
            hashed.update(logits.to("cpu", torch.float32).contiguous().numpy().tobytes())
    finally:
        engine.pool.close(table)
    parts = [info.dtype, info.quantization]
    if info.tensor_parallel_size > 1:
        parts.append(f"tp{info.tensor_parallel_size}")
    return "-".join([*filter(None, parts), hashed.hexdigest()[:DIGITS]])
