"""What an engine turned out to run with, in words: people see in one line what was left out."""

from __future__ import annotations

from outrider.engine.drawing import width_of
from outrider.engine.engine import Engine
from outrider.engine.parts import CALLS
from outrider.sampling.draw_kernels import draw_kernels


def in_use(engine: Engine) -> str:
    """Returns its parts and, on a GPU, the tokens that its KV pool holds: "triton attention, ordinary
    products, layers compiled, steps recorded, draws by kernels, KV for 81,920 tokens"."""
    runner, pool = engine.runner, engine.pool
    parts = [
        f"{engine.attention.name} attention",
        f"{engine.linears.name} products",
        "layers compiled" if runner.compiled else "layers as they are",
        "steps call by call" if runner.name == CALLS else "steps recorded",
    ]
    if not engine.on_cpu:
        kernels = draw_kernels(
            next(engine.model.parameters()).device, width_of(engine.group), engine.vocabulary is not None
        )
        parts.append("draws by torch" if kernels is None else "draws by kernels")
        parts.append(f"KV for {pool.num_blocks * pool.block_size:,} tokens")
    return ", ".join(parts)
