"""Shows at load that the engine gives what the model's own code gives, and whether to the bit.

A model that cannot be run rightly through the paged attention is refused here, by what it lacks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from outrider.engine.attention import NAME
from outrider.engine.engine import Engine, Work
from outrider.engine.invariance import linears_keep_bits
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.ranks import of_the_group
from outrider.errors import ModelRefused, PeerLost
from outrider.wire.description import ModelInfo

LENGTH = 72  # tokens of the check
WINDOW = 23  # sliding windows are shortened to it meanwhile, so that they take effect
PROBE_BLOCKS = 32
# Of the largest logit, between two ways to compute the same.
TOLERANCE: dict[torch.dtype | None, float] = {torch.float32: 1e-3}
COARSE = 0.08  # of other dtypes, and of layers that are quantised


def reference(model: Any, info: ModelInfo) -> torch.Tensor:
    """Logits [LENGTH, V] of the check's tokens from the model's own attention, all in one forward pass.

    Leaves the model set to the paged attention. Raises ModelRefused for what shows without running that."""
    text = model.config.get_text_config()
    if getattr(model, "_is_stateful", False) or _recurrent_layers(text):
        raise _refused(info, "it keeps recurrent state, which cannot be taken back when a draft is rejected")
    if getattr(text, "attention_chunk_size", None):
        raise _refused(info, "its chunked attention lives in the mask, which this engine does not build")
    if info.max_context < LENGTH + WINDOW:
        raise _refused(
            info, f"its context of {info.max_context} tokens is shorter than the check that it must pass"
        )
    if not model._can_set_attn_implementation():
        raise _refused(info, "it has attention code of its own, which cannot be replaced")
    device = next(model.parameters()).device
    ids = torch.tensor([_tokens(info)], device=device)
    try:
        with torch.inference_mode(), _short_windows(model):
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
    except Exception as error:  # whatever a damaged configuration, or a part of the model, makes of it
        if of_the_group(error):
            raise PeerLost("a process of the tensor-parallel group ended") from error
        raise _refused(info, f"its own code does not run ({type(error).__name__})") from error
    model.set_attn_implementation(NAME)
    return logits  # type: ignore[no-any-return]


def check(engine: Engine, expected: torch.Tensor, *, bits: bool) -> ModelInfo:
    """Returns the engine's info, with `bit_exact` as found. `expected` is what `reference` gave. `bits`:
    whether to look for that, and for the way in which rows attend together.

    Raises ModelRefused where the engine's logits differ by more than rounding."""
    info = engine.info
    with _short_windows(engine.model):
        try:
            logits = _run(engine, [LENGTH])
        except ModelRefused as refusal:
            raise _refused(info, refusal.message) from None
        except PeerLost:
            raise
        except Exception as error:  # a model may do anything with a call that it does not expect
            raise _refused(
                info, f"it does not run with the paged attention ({type(error).__name__})"
            ) from error
        layers = engine.model.config.get_text_config().num_hidden_layers
        if (attending := len(engine.attention.layers)) != layers:
            raise _refused(
                info,
                f"{attending} of its {layers} layers attend through transformers' attention "
                "interface; the others have attention code or state of their own",
            )
        if logits.shape != expected.shape:
            raise _refused(info, "it does not take logits_to_keep")
        if bits:
            engine.attention.batch_rows()
            logits = _run(engine, [LENGTH])
        chunked = _run(engine, [30, 1, 9, 17, 15], rejected=3)
        dtype = None if info.quantization else next(engine.model.parameters()).dtype
        limit = TOLERANCE.get(dtype, COARSE) * float(expected.abs().max())
        for found, how in ((logits, "in one chunk"), (chunked, "in several chunks")):
            apart = float((found - expected).abs().max())
            if not apart <= limit:
                raise _refused(
                    info,
                    f"its logits with paged attention, {how}, are {apart:.2g} away from its own code's "
                    f"(allowed: {limit:.2g}): its masks or positions mean something else",
                )
        exact = bits and torch.equal(logits, chunked) and _same_bits(engine, logits)
    exact = exact and linears_keep_bits(engine.model) and engine.attention.keeps_bits()
    return replace(info, bit_exact=exact)


def check_rounded(engine: Engine, expected: torch.Tensor, quantization: str) -> tuple[ModelInfo, float]:
    """The engine's info once its layers are rounded, with `bit_exact` as found, and how far its logits are
    from `expected`, those in float32: the length of the difference over theirs.

    There is no other code to compare with: rows alone and in company are compared with one another."""
    with _short_windows(engine.model):
        engine.attention.batch_rows()
        logits = _run(engine, [LENGTH])
        chunked = _run(engine, [30, 1, 9, 17, 15], rejected=3)
        exact = torch.equal(logits, chunked) and _same_bits(engine, logits)
    exact = exact and linears_keep_bits(engine.model) and engine.attention.keeps_bits()
    off = float((logits - expected).norm() / expected.norm())
    return replace(engine.info, quantization=quantization, bit_exact=exact), off


def _same_bits(engine: Engine, expected: torch.Tensor) -> bool:
    """Returns whether single tokens, and a batch with another session, give the bits of the one chunk."""
    alone = _run(engine, [LENGTH - 4, 1, 1, 1, 1])
    together = _run(engine, [33, 2, 30, 7], company=True)
    return torch.equal(alone, expected) and torch.equal(together, expected)


def _run(engine: Engine, chunks: Sequence[int], *, rejected: int = 0, company: bool = False) -> torch.Tensor:
    """Returns all logits [LENGTH, V] of the check's tokens, read in chunks; between chunks, so many wrong
    drafts are taken in and back. In company, another session runs beside them."""
    tokens = _tokens(engine.info)
    pool, table, other = engine.pool, BlockTable(), BlockTable()
    found = []
    try:
        for chunk in chunks:
            start = table.length
            part = tokens[start : start + chunk]
            drafts = tokens[:rejected]
            pool.extend(table, chunk + rejected)
            works = [Work(table.blocks, start, [*part, *drafts], chunk + rejected)]
            if company:
                pool.extend(other, 5)
                works.insert(0, Work(other.blocks, other.length - 5, tokens[10:15], 2))
            logits = engine.step(works)
            found.append(logits[2 * company :][:chunk].clone())
            pool.truncate(table, start + chunk)
    finally:
        pool.close(table)
        pool.close(other)
    return torch.cat(found)


def _tokens(info: ModelInfo) -> list[int]:
    rng = random.Random(20)
    return [rng.randrange(info.vocab_size) for _ in range(LENGTH)]


def _recurrent_layers(text: Any) -> bool:
    kinds = set(getattr(text, "layer_types", None) or ())
    return any("attention" not in kind or "linear" in kind for kind in kinds)


@contextmanager
def _short_windows(model: Any) -> Iterator[None]:
    """Shortens every sliding window, in the configuration and in the layers, for the time of the check."""
    owners = [module for module in model.modules() if _window(module)] + [
        config for config in (model.config, model.config.get_text_config()) if _window(config)
    ]
    before = [(owner, owner.sliding_window) for owner in owners]
    for owner in owners:
        owner.sliding_window = min(owner.sliding_window, WINDOW)
    try:
        yield
    finally:
        for owner, window in before:
            owner.sliding_window = window


def _window(owner: Any) -> bool:
    return isinstance(getattr(owner, "sliding_window", None), int) and owner.sliding_window > 0


def _refused(info: ModelInfo, reason: str) -> ModelRefused:
    return ModelRefused(f"{info.architecture} ({info.name}) cannot be served exactly: {reason}")
