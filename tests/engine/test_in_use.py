"""What a worker says that its engine runs with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.engine import triton_layers
from outrider.engine.engine import Engine
from outrider.engine.fusing import fuse, unfuse
from outrider.engine.in_use import in_use
from outrider.engine.linear_layers import Invariant
from outrider.engine.loading import load_engine
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.parts import LINEARS, Parts
from outrider.engine.recording import called_again
from outrider.engine.reference_attention import KERNEL as REFERENCE
from outrider.engine.replayed import recorded
from outrider.engine.runner import CallByCall


def test_the_parts_are_named_as_they_are(engine: Callable[..., Engine]) -> None:
    plain = engine("llama")
    made = Engine(plain.model, plain.info, PagedAttention.on(plain.model, 256, REFERENCE))
    assert in_use(made) == "reference attention, ordinary products, layers in one pass, steps call by call"
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


def test_products_are_named_for_what_computes_them(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An image without a compiler said that its products were by kernels, and torch computed them."""

    def fails(*_: object) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(triton_layers, "try_out", fails)
    monkeypatch.setitem(LINEARS, "ordinary", Invariant("invariant", "TritonLinear", keeps_numbers=True))
    parts = Parts(("reference",), "calls", "ordinary")
    said = in_use(load_engine(str(checkpoint("llama")), kv_memory_bytes=2**24, parts=parts))
    assert said == "reference attention, ordinary products, layers as they are, steps call by call"
    assert (
        "torch computes products, whose rows depend on their company: RuntimeError: no compiler"
        in caplog.text
    )
