"""Architectures served by the engine: the model's own greedy text in ragged batches, and the same bits in any
company. tests/zoo tries all that there are; here are some that differ in what an engine has to do."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine import assembly, recurrent_layers, self_check, short_windows
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from tests.zoo import serving
from tests.zoo.serving import logits_of, own_text, prompts, serve
from tests.zoo.shapes import tiny
from tests.zoo.verdict import Outcome, verdict

VOCAB = 199

EXACT = (
    "gpt2",  # Conv1D, learned positions
    "gemma2",  # caps, windows
    "gemma3n_text",  # layers that share keys and values
    "jetmoe",  # experts in attention, products by slices of a weight
    "deepseek_v3",  # low-rank attention, a router with sigmoid and a correction
    "deepseek_v32",  # an indexer that picks the keys that a token sees
    "minimax_m3_vl_text",  # one that picks blocks of keys for each key head
    "glm_moe_dsa",  # layers that share what it picks
    "phimoe",  # a router that is a subclass of nn.Linear
    "dbrx",  # a router with softmax, whose product has no module of its own
    "hunyuan_v1_moe",  # a gate that asks for a layer's weight
    "gpt_oss",  # attention sinks, a router with a bias
    "mimo_v2_flash",  # sinks beside values of another width than keys
    "llama4_text",  # chunks, and a temperature that depends on the position
    "lfm2",  # short convolutions between the layers that attend
    "nemotron_h",  # Mamba-2, and layers of experts alone
    "qwen2_5_vl",  # the text part of a multimodal model
)
# One by one past a window and two blocks, and two chunks that begin within one.
PARTITIONS = (((*(1,) * 36, 34), True), ((33, 17, 9, 5, 3, 2, 1), True), ((69, 1), False))
RECURRENT = (
    "jamba",  # Mamba
    "kimi_linear",  # the gated delta rule with a decay of each channel
    "minimax",  # linear attention with a decay of each head
    "rwkv",  # a mean with weights that fade, and a look at the token before
    "recurrent_gemma",  # a gated linear unit, between layers with windows
)
REFUSED = {
    "whisper": "it does not take logits_to_keep",
    "moshi": "its own cache forgets what layer 0 still attends to",
    "camembert": "its masks or positions mean something else",
    "xlstm": "it keeps recurrent state",
}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "OUTPUT", 16)  # `make zoo` has three times as many
    monkeypatch.setattr(serving, "PARTITIONS", PARTITIONS)  # and two more


@pytest.mark.parametrize("model_type", EXACT)
def test_served_bit_exact(model_type: str, tmp_path: Path) -> None:
    found = verdict(model_type, tmp_path)
    assert found.outcome is Outcome.EXACT, found.reason


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_layers_give_their_models_logits_and_keep_bits(model_type: str, tmp_path: Path) -> None:
    found = verdict(model_type, tmp_path, text=False)
    assert found.outcome is Outcome.EXACT, found.reason


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_with_the_cause(model_type: str, tmp_path: Path) -> None:
    found = verdict(model_type, tmp_path)
    assert found.outcome is Outcome.REFUSED and REFUSED[model_type] in found.reason


def test_time_steps_are_limited_as_the_checkpoint_says() -> None:
    """transformers limits those of Nemotron-H by another number of its configuration."""
    for model_type, limits in (("nemotron_h", (0.0, math.inf)), ("mamba2", (0.1, math.inf))):
        config = tiny(model_type)
        config.time_step_limit = list(limits)
        model = AutoModelForCausalLM.from_config(config)
        recurrent_layers.as_published(model)
        reason = recurrent_layers.obstacle(model)
        assert reason is None if not limits[0] else reason and "limits time steps" in reason


@pytest.mark.parametrize("model_type", ["mixtral", "gemma4_text", "gpt_oss"])  # the last attends in one way
def test_bfloat16_is_held_against_the_models_own_rounding(model_type: str, tmp_path: Path) -> None:
    found = verdict(model_type, tmp_path, dtype="bfloat16")
    assert found.outcome in (Outcome.EXACT, Outcome.NOT_EXACT), found.reason


def test_rounding_hides_no_window_that_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = self_check.reference

    def of_another_window(*arguments: Any) -> self_check.Reference:
        found = reference(*arguments)
        monkeypatch.setattr(short_windows, "WINDOW", short_windows.WINDOW - 1)
        return found

    monkeypatch.setattr(assembly, "reference", of_another_window)
    found = verdict("gpt_oss", tmp_path, dtype="bfloat16")
    assert found.outcome is Outcome.REFUSED and "its masks or positions mean something else" in found.reason


def test_ragged_batches_give_the_models_own_greedy_text(
    checkpoint: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint("llama"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    texts = [(prompt, own_text(model, prompt)) for prompt in prompts(random.Random(3), VOCAB)]
    assert len({token for _, output in texts for token in output}) > 10, "the text does not vary"
    served = serve(engine("llama"), texts, VOCAB)
    assert served.own
    assert served.shared >= 32 and sum(session.accepted for session in served.sessions) > 50


@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma2"])
def test_logits_keep_their_bits_over_many_keys(arch: str, engine: Callable[..., Engine]) -> None:
    running = engine(arch)
    rng = random.Random(6)
    tokens = [rng.randrange(VOCAB) for _ in range(900)]
    whole = logits_of(running, tokens, [900], company=False, vocab=VOCAB)
    pieces = [200, 55, 1, 9, 240, 6, 1, 1, 1, 130, 200, 1, 55]
    assert torch.equal(logits_of(running, tokens, pieces, company=True, vocab=VOCAB), whole)


def test_widths_that_kernels_cannot_take_whole_keep_their_bits(engine: Callable[..., Engine]) -> None:
    running = engine("llama", intermediate_size=50, vocab_size=VOCAB, head_dim=12)
    assert running.info.bit_exact
    tokens = [random.Random(8).randrange(VOCAB) for _ in range(80)]
    whole = logits_of(running, tokens, [80], company=False, vocab=VOCAB)
    for chunks in ([1] * 80, [3, 5, 7, 64, 1]):
        assert torch.equal(logits_of(running, tokens, chunks, company=True, vocab=VOCAB), whole)


def test_logits_keep_their_bits_on_two_threads(checkpoint: Callable[..., Path]) -> None:
    """With caps, windows and torch's attention; test_resting_threads.py has attention of our own."""
    folder = checkpoint("gemma2")
    tokens = [random.Random(9).randrange(VOCAB) for _ in range(90)]
    found = []
    try:
        for threads in (1, 2):
            running = load_engine(str(folder), threads=threads, kv_memory_bytes=2**24)
            assert running.info.bit_exact
            for chunks in ([90], [30, 1, 40, 1, 18]):
                found.append(logits_of(running, tokens, chunks, company=True, vocab=VOCAB))
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(logits, found[0]) for logits in found)


def test_a_chunk_in_the_middle_of_a_prompt_gives_no_rows(engine: Callable[..., Engine]) -> None:
    running = engine("llama")
    table = BlockTable()
    running.pool.extend(table, 40)
    assert running.step([Work(table.blocks, 0, [1] * 40, 0)]).shape == (0, VOCAB)
    other = BlockTable()
    running.pool.extend(other, 1)
    running.pool.extend(table, 3)
    logits = running.step([Work(table.blocks, 40, [1, 2, 3], 2), Work(other.blocks, 0, [5], 1)])
    assert logits.shape == (3, VOCAB) and logits.dtype == torch.float32
