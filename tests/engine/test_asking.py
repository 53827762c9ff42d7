"""A step has been asked for when the event loop goes on with other work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

from outrider.engine.engine import Engine, Work
from outrider.engine.flat_inputs import FlatStep
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.recording import called_again
from outrider.engine.reference_attention import KERNEL as REFERENCE
from outrider.engine.replayed import Replayed, recorded
from outrider.engine.runner import CallByCall
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row


async def test_the_device_has_been_asked_for_a_step_when_the_loop_goes_on(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the engine's thread would wait for its turn while the loop works, and the device for that."""
    plain = engine("llama")
    other = Engine(plain.model, plain.info, PagedAttention.on(plain.model, 256, REFERENCE))
    assert isinstance(other.runner, CallByCall)
    runner = recorded(other.runner, other.info, called_again, lambda _: None, 4)
    assert isinstance(runner, Replayed)
    other.runner = runner
    graphs, asked, over = runner.graphs, list[str](), threading.Event()
    run, tokens = graphs.run, graphs.tokens

    def slowly(step: FlatStep) -> torch.Tensor:
        time.sleep(0.2)
        asked.append("step")
        return run(step)

    def waits(rows: int) -> list[int]:
        assert over.wait(60)
        return tokens(rows)

    monkeypatch.setattr("outrider.engine.engine.ASKED_SECONDS", 60.0)
    monkeypatch.setattr(graphs, "run", slowly)
    monkeypatch.setattr(graphs, "tokens", waits)
    row = Row(SamplingParams(temperature=0.0), 1, None, ())
    step = other.run_step(other.choose, other.prepare([Work([0], 0, [1], 1)]), [row])
    assert asked == ["step"]
    assert not step.done()
    over.set()
    assert len(await step) == 1
    other.close()
