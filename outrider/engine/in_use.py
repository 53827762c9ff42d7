"""What an engine turned out to run with, in words: people see in one line what was left out."""

from __future__ import annotations

from outrider.engine.drawing import width_of
from outrider.engine.engine import Engine
from outrider.engine.linear_layers import Ordinary
from outrider.engine.packed import PackedLinear
from outrider.engine.parts import CALLS
from outrider.engine.plain_pass import runs_plainly
from outrider.engine.replayed import Replayed
from outrider.engine.torch_drawing import TorchDrawing
from outrider.sampling.draw_kernels import draw_kernels


def in_use(engine: Engine) -> str:
    """Returns its parts and, on a GPU, the tokens that its KV pool holds: "triton attention, ordinary
    products, layers compiled, steps recorded, draws by kernels, KV for 81,920 tokens"."""
    runner, pool, model = engine.runner, engine.pool, engine.model
    packed = any(isinstance(module, PackedLinear) for module in model.modules())  # kernels may not work here
    layers = "compiled" if runner.compiled else "in one pass" if runs_plainly(model) else "as they are"
    parts = [
        f"{engine.attention.name} attention",
        f"{engine.linears.name if packed else Ordinary.name} products",
        f"layers {layers}",
        "steps call by call" if runner.name == CALLS else "steps recorded",
    ]
    if not engine.on_cpu:
        parts.append("draws by kernels" if _draws_by_kernels(engine) else "draws by torch")
        parts.append(f"KV for {pool.num_blocks * pool.block_size:,} tokens")
    return ", ".join(parts)


def _draws_by_kernels(engine: Engine) -> bool:
    if isinstance(engine.runner, Replayed):
        return not isinstance(engine.runner.graphs.drawing, TorchDrawing)
    device = next(engine.model.parameters()).device
    return draw_kernels(device, width_of(engine.group), engine.vocabulary is not None) is not None
