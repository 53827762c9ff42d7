"""The engine against transformers' own `generate`: the same text, and how fast that is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu_timing import Device
from outrider.engine.attention import NAME
from outrider.engine.engine import Engine, Work
from outrider.engine.fusing import unfuse
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row

GREEDY = SamplingParams(temperature=0.0)


def exactness(device: Device, target: Path, tell: Callable[[str], None], tokens: int = 64) -> dict[str, Any]:
    """Compares the engine with `generate` of the model's own code, greedy, in the number format of the
    device.

    At each position of generate's text the engine's likeliest token is compared, with the text before it
    given: a near-tie that rounds the other way counts once. And the engine's own text with right and wrong
    drafts against its text without."""
    tell("exactness against generate")
    dtype = "bfloat16" if device.is_gpu else "float32"
    own = AutoModelForCausalLM.from_pretrained(
        target, dtype=getattr(torch, dtype), attn_implementation="eager"
    )
    own = own.to(device.torch).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    engine = load_engine(str(target), device=str(device.torch), dtype=dtype, kv_memory_bytes=2**27)
    agree = total = same = 0
    texts = ("def main():\n    ", "import os\n\nclass ", "for index in range(", "    return self.")
    for text in texts:
        prompt = tokenizer(text)["input_ids"]
        ids = torch.tensor([prompt], device=device.torch)
        out = own.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )[0].tolist()
        table = BlockTable()
        engine.pool.extend(table, len(out) - 1)
        wanted = len(out) - len(prompt)
        likeliest = engine.step([Work(table.blocks, 0, out[:-1], wanted)]).argmax(-1).tolist()
        engine.pool.close(table)
        agree += sum(a == b for a, b in zip(likeliest, out[len(prompt) :], strict=True))
        total += wanted
        plain = text_of(engine, prompt, wanted, [])
        same += plain == text_of(engine, prompt, wanted, plain)
    return {
        "dtype": dtype,
        "share_of_tokens_as_generate": agree / total,
        "texts_as_without_drafts": same / len(texts),
        "kernel": engine.attention.name,
    }


def text_of(engine: Engine, prompt: list[int], tokens: int, guess: list[int]) -> list[int]:
    """Returns greedy text, with drafts of 4 tokens from a guess of which every fifth token is wrong."""
    log, table = list(prompt), BlockTable()
    while len(log) < len(prompt) + tokens:
        done = len(log) - len(prompt)
        drafts = [token if (done + i) % 5 else 1 for i, token in enumerate(guess[done : done + 4])]
        pending = log[table.length :]
        start = table.length
        engine.pool.extend(table, len(pending) + len(drafts))
        work = Work(table.blocks, start, [*pending, *drafts], len(drafts) + 1)
        rows = [Row(GREEDY, len(log) + i, None, ()) for i in range(len(drafts) + 1)]
        chosen = engine.choose(engine.prepare([work]), rows)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
            accepted += 1
        engine.pool.truncate(table, len(log) + accepted)
        log += chosen[: accepted + 1]
    engine.pool.close(table)
    return log[len(prompt) : len(prompt) + tokens]


def generate_rate(
    engine: Engine, device: Device, context: int, tokens: int, tell: Callable[[str], None]
) -> float:
    """Returns the tokens a second of transformers' own `generate` with one stream of the same target, as most
    use it."""
    tell("transformers' generate")
    unfuse(engine.model)
    engine.model.set_attn_implementation("sdpa")
    ids = torch.ones(1, context, dtype=torch.int64, device=device.torch)
    seconds = []
    for wanted in (1, 1 + tokens):  # the first reads the prompt
        began = device.now()
        engine.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=wanted,
            max_new_tokens=wanted,
            pad_token_id=0,
        )
        seconds.append(device.now() - began)
    engine.model.set_attn_implementation(NAME)
    return tokens / (seconds[1] - seconds[0])
