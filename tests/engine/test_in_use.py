"""What a worker says that its engine runs with."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.engine import Engine
from outrider.engine.fusing import fuse, unfuse
from outrider.engine.in_use import in_use
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.recording import called_again
from outrider.engine.reference_attention import KERNEL as REFERENCE
from outrider.engine.replayed import recorded
from outrider.engine.runner import CallByCall


def test_the_parts_are_named_as_they_are(engine: Callable[..., Engine]) -> None:
    plain = engine("llama")
    made = Engine(plain.model, plain.info, PagedAttention.on(plain.model, 256, REFERENCE))
    assert in_use(made) == "reference attention, ordinary products, layers as they are, steps call by call"
    assert isinstance(made.runner, CallByCall)
    made.runner = recorded(made.runner, made.info, called_again, lambda _: None, 4)
    made.on_cpu = False  # as on a GPU
    fuse(made.model, "eager")
    try:
        said = in_use(made)
    finally:
        unfuse(made.model)
    assert said == (
        "reference attention, ordinary products, layers compiled, steps recorded, "
        "draws by torch, KV for 4,096 tokens"
    )
