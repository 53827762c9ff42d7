"""What a drafter refuses to draft for."""

from __future__ import annotations

from dataclasses import replace

from drafter.service import DrafterService
from drafter.session import DraftSpec
from outrider.sampling.params import SamplingParams
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.wire.session import SessionParams

MODEL = ModelInfo("draft", "", "LlamaForCausalLM", 1, 100, 64, (0,), "cpu", "float32", True)
FITS = DraftSpec(b"s" * 16, SessionParams((1, 2), SamplingParams(), 8), (), b"k" * 16, 100)


def test_a_session_that_cannot_be_drafted_for_is_refused_by_a_sentence() -> None:
    service = DrafterService(
        WorkerInfo(Identity(Role.DRAFTER, "d", 1, "", "t"), MODEL, 3, 16), TokenizerFiles("t", "{}", "")
    )
    assert service._unfit(FITS) is None
    for change, sentence in (
        ({"target_vocab_size": 0}, "target_vocab_size must be at least 1"),  # nothing could be drawn
        ({"params": replace(FITS.params, max_tokens=63)}, "the draft's context has 64"),
        ({"params": replace(FITS.params, max_tokens=47)}, "the drafter's KV pool holds 48"),
        ({"output": (100,)}, "no token ids above 99"),
        ({"params": replace(FITS.params, sampling=SamplingParams(temperature=-1))}, "temperature must be in"),
    ):
        assert sentence in str(service._unfit(replace(FITS, **change)))
