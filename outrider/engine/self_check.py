"""Shows at load that the engine gives what the model's own code gives, and whether to the bit.

A model that cannot be run rightly through the paged attention is refused here, by what it lacks.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from outrider.engine import indexer, recurrent_layers, short_convolution, temperature
from outrider.engine.attention import NAME
from outrider.engine.choices import Choices
from outrider.engine.engine import Engine, Step, Work
from outrider.engine.flat_inputs import Shape
from outrider.engine.invariance import linear_products, linears_keep_bits
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.placeless_calls import replacing
from outrider.engine.ranks import of_the_group
from outrider.engine.rounding import rounding_anew
from outrider.engine.running_modules import RowPrints, RunningModules
from outrider.engine.short_windows import WINDOW, short_windows
from outrider.errors import ModelRefused, PeerLost, in_one_line
from outrider.wire.description import ModelInfo

log = logging.getLogger(__name__)

LENGTH = 72  # tokens of the check
STATELESS = {"moe", "mlp"}  # kinds of layers that do not attend
PROBE_BLOCKS = 32
CHUNKS = (30, 1, 41)  # tokens of a step
DRAFTED, DRAFTS = 1, 3  # the step of these that so many wrong drafts take part in
ALONE = (1, 2, 3, 5, 9, 17, 33, 2)
TOGETHER = ((33, 17, 9, 5, 3, 2, 1, 2), (1, 3, 17, 2, 33, 9, 2, 5))  # of two sessions that run in one step
NOISE = 0.1  # of the size of norms and biases, so that they are not all alike in a check of bits
# How far a token's logits may lie from the model's own, as a share of their length.
TOLERANCE = 1e-3  # in float32
COARSE = 0.08  # of other dtypes, if the model has no second way to attend
ROUNDED = 2  # times what its two ways lie apart
MOST = 0.75  # of the tokens have to, then: rounding lets a few choose other experts


@dataclass(frozen=True, slots=True)
class Reference:
    """What the model's own code gives."""

    logits: torch.Tensor  # [LENGTH, V] of the check's tokens
    tolerance: float  # how far a token's logits may lie from them, as a share of their length
    share: float = 1.0  # of the tokens whose logits may not lie farther
    bare: frozenset[nn.Module] = frozenset()  # layers that others take the weights of, in place of a call
    again: torch.Tensor | None = None  # logits of another text: of a model that chooses, by its rounding too

    def apart(self, found: torch.Tensor) -> float:
        """Returns how far this share of the tokens lies from the logits at most."""
        rows = (found - self.logits).norm(dim=1) / self.logits.norm(dim=1)
        return float(rows.sort().values[int(self.share * (len(rows) - 1))])


def reference(model: Any, info: ModelInfo) -> Reference:
    """Returns what the model's own attention gives, all in one forward pass.

    Leaves the model set to the paged attention. Raises ModelRefused for what shows without running that."""
    recurrent_layers.as_published(model)
    for part in (indexer, recurrent_layers):
        if (reason := part.obstacle(model)) is not None:
            raise _refused(info, reason)
    if _keeps_state(model):
        raise _refused(
            info, "it keeps recurrent state in a way of its own, which takes back no draft that is rejected"
        )
    if info.max_context < LENGTH + WINDOW:
        raise _refused(
            info, f"its context of {info.max_context} tokens is shorter than the check that it must pass"
        )
    if not (model._can_set_attn_implementation() or recurrent_layers.are_in(model)):
        raise _refused(info, "it has attention code of its own, which cannot be replaced")
    with short_windows(model), _told(info, model, "its own code does not run") as modules:
        with Choices() as choices:
            found = Reference(_own_logits(model, info), TOLERANCE)
        if next(model.parameters()).dtype != torch.float32 or info.quantization:
            found = _rounded(model, info, found.logits)
        elif choices.made:
            found = replace(found, again=_own_logits(model, info, text=1))
    model.set_attn_implementation(NAME)
    for part in (temperature, short_convolution, recurrent_layers, indexer):
        part.take_over(model)
    return replace(found, bare=_bare(modules))


def check(engine: Engine, expected: Reference, *, bits: bool) -> ModelInfo:
    """Returns the engine's info, with `bit_exact` as found. `bits`: whether to look for that, and for the way
    in which rows attend together.

    Raises ModelRefused where the engine's logits differ by more than rounding."""
    info, model = engine.info, engine.model
    with short_windows(model):
        with (
            _told(info, model, "it does not run with the paged attention") as modules,
            replacing(modules) if bits else nullcontext(),
        ):
            run(engine, [[LENGTH]])
        layers = _attending_layers(model)
        if (attending := len({*engine.attention.layers, *engine.attention.others})) != layers:
            raise _refused(
                info,
                f"{attending} of its {layers} layers attend through transformers' attention "
                "interface; the others have attention code or state of their own",
            )
        with _told(info, model, "its configuration is not that of its architecture"):
            layer = _forgetful_layer(model, engine)
        if layer is not None:
            raise _refused(
                info,
                f"its own cache forgets what layer {layer} still attends to: its text depends on the cache",
            )
        if bits:
            engine.attention.batch_rows()
        with _told(info, model, "it does not run with the paged attention"):
            alike, reason = _held_against(engine, expected)
            if reason and expected.again is not None:  # rounding may have chosen, which it hardly does twice
                alike, reason = _held_against(engine, replace(expected, logits=expected.again), text=1)
        if reason:
            raise _refused(info, reason)
        exact = bits and alike and keeps_bits(engine)
    return replace(info, bit_exact=exact)


def _held_against(engine: Engine, expected: Reference, text: int = 0) -> tuple[bool, str]:
    """Returns whether the logits of a text are the same to the bit in one chunk and in several, and in what
    they differ from the expected."""
    whole, chunked = (run(engine, [counts], text=text)[0] for counts in ([LENGTH], CHUNKS))
    for found, how in ((whole, "in one chunk"), (chunked, "in several chunks")):
        apart = expected.apart(found)
        if not apart <= expected.tolerance:
            return False, (
                f"its logits with paged attention, {how}, are {apart:.1%} away from its own code's "
                f"(allowed: {expected.tolerance:.1%}): its masks or positions mean something else"
            )
    return torch.equal(whole, chunked), ""


def check_rounded(
    engine: Engine, expected: Reference, quantization: str, *, bits: bool
) -> tuple[ModelInfo, float]:
    """The engine's info once its layers are rounded, with `bit_exact` as found, and how far its logits are
    from the expected, those in float32: the length of the difference over theirs.

    There is no other code to compare with: rows alone and in company are compared with one another, if `bits`
    says so."""
    if not bits:
        with short_windows(engine.model):
            logits = run(engine, [[LENGTH]])[0]
        off = float((logits - expected.logits).norm() / expected.logits.norm())
        return replace(engine.info, quantization=quantization, bit_exact=False), off
    with short_windows(engine.model):
        with RunningModules(engine.model) as modules, replacing(modules):
            run(engine, [[LENGTH]])
        engine.attention.batch_rows()
        logits = run(engine, [[LENGTH]])[0]
        exact = torch.equal(logits, run(engine, [CHUNKS])[0]) and keeps_bits(engine)
    off = float((logits - expected.logits).norm() / expected.logits.norm())
    return replace(engine.info, quantization=quantization, bit_exact=exact), off


def keeps_bits(engine: Engine) -> bool:
    """Returns whether a token gets the same bits alone, among others and in company, from every module, with
    noise in norms and biases meanwhile; logs the first module that gives others."""
    model = engine.model
    with _noise(model), RunningModules(model) as modules:
        prints = RowPrints(modules, LENGTH, model.get_output_embeddings())
        whole = run(engine, [[LENGTH]], prints=prints)[0]
        found = run(engine, [ALONE], prints=prints) + run(engine, TOGETHER, prints=prints)
    if prints.differing is not None:
        log.warning("%s is not bit-exact: %s", engine.info.name, prints.differing)
        return False
    same = all(torch.equal(logits, whole) for logits in found)
    return same and linears_keep_bits(model) and engine.attention.keeps_bits()


def kernels_keep_bits(engine: Engine) -> bool:
    """Returns whether a token gets the same bits alone and in company from an engine on a GPU, whose steps
    may be recorded, in all shapes that these have; logs it if not."""
    model = engine.model
    with short_windows(model):
        whole = run(engine, [[LENGTH]])[0]
        with _noise(model):
            noisy = run(engine, [[LENGTH]])[0]
            found = run(engine, [ALONE]) + run(engine, TOGETHER)
            same = all(torch.equal(logits, noisy) for logits in found)
        filled = [_fills(engine, shape, whole) for shape in getattr(engine.runner, "shapes", ())]
    same = same and all(filled) and linears_keep_bits(model) and engine.attention.keeps_bits()
    if not same:
        log.warning("%s is not bit-exact here: a row's bits depend on its company", engine.info.name)
    return same


def _fills(engine: Engine, shape: Shape, whole: torch.Tensor) -> bool:
    """Returns whether a step of this shape gives the check's first tokens the logits that they have alone, in
    as many sessions as fill it: so every row of it is tried. All ranks of a group run it alike."""
    count = min(shape.tokens, shape.longest, LENGTH)
    most = max(1, min(shape.tokens // count, engine.pool.available // -(-count // engine.pool.block_size)))
    while most > 1 and not shape.holds(np.full(most, count), engine.pool.block_size):
        most -= 1  # what is left over is filled up, and takes places, too
    tables = [BlockTable() for _ in range(most)]
    try:
        for table in tables:
            engine.pool.extend(table, count)
        works = [Work(table.blocks, 0, check_tokens(engine.info)[:count], count) for table in tables]
        step = Step(engine.attention.prepare(works, [shape]), engine.group.encode(works))
        logits = engine.forward(step)
        return all(torch.equal(logits[at : at + count], whole[:count]) for at in range(0, len(logits), count))
    finally:
        for table in tables:
            engine.pool.close(table)


def same_bits(engine: Engine, threads: int) -> bool:
    """Returns whether so many threads give the same bits as those that torch has now; logs it if not."""
    usual, model = torch.get_num_threads(), engine.model
    if threads == usual:
        return True
    whole = run(engine, [[LENGTH]])[0]
    products = linear_products(model)
    torch.set_num_threads(threads)
    try:
        found = run(engine, [[LENGTH]]) + run(engine, [ALONE]) + run(engine, TOGETHER)
        same = all(torch.equal(logits, whole) for logits in found)
        same = same and linears_keep_bits(model, products) and engine.attention.keeps_bits()
    finally:
        torch.set_num_threads(usual)
    if not same:
        log.warning("%s has other bits with %d threads than with %d", engine.info.name, threads, usual)
    return same


def _by_company(model: Any, info: ModelInfo, whole: Reference) -> float:
    """Returns how far the model's own logits lie apart if fewer tokens run together, where a package's layers
    multiply: some round a row by those that run with it."""
    if not info.quantization:
        return 0.0
    parts = [_own_logits(model, info, first=count) for count in ALONE]
    return max(replace(whole, logits=whole.logits[: len(part)]).apart(part) for part in parts)


def _own_logits(model: Any, info: ModelInfo, text: int = 0, first: int = LENGTH) -> torch.Tensor:
    """Returns the logits of the first tokens of a text, by the model's own code."""
    ids = torch.tensor([check_tokens(info, text)[:first]], device=next(model.parameters()).device)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits


def _rounded(model: Any, info: ModelInfo, logits: torch.Tensor) -> Reference:
    """Returns the reference of a model whose numbers are coarse: what is allowed follows from how far its own
    logits lie apart if it attends in its other way, and if rounding were another one everywhere."""
    found = Reference(logits, COARSE, MOST)
    with rounding_anew(model):
        moved = max(found.apart(_own_logits(model, info)), _by_company(model, info, found))
    try:
        if recurrent_layers.are_in(model):  # most of its layers have the one way only
            raise ValueError
        model.set_attn_implementation("sdpa")
    except ValueError:  # it has the one way only
        return replace(found, tolerance=max(COARSE, moved))
    apart = found.apart(_own_logits(model, info))
    return replace(found, tolerance=max(TOLERANCE, ROUNDED * apart, moved))


def run(
    engine: Engine, sessions: Sequence[Sequence[int]], prints: RowPrints | None = None, text: int = 0
) -> list[torch.Tensor]:
    """Returns all logits [LENGTH, V] of the check's tokens for each of some sessions, which read them side by
    side in as many steps, so many tokens in each. In CHUNKS, wrong drafts are taken in and back, in company
    of which not all logits are wanted."""
    tokens, pool, stranger = check_tokens(engine.info, text), engine.pool, BlockTable()
    tables = [BlockTable() for _ in sessions]
    found: list[list[torch.Tensor]] = [[] for _ in sessions]
    try:
        for step, counts in enumerate(zip(*sessions, strict=True)):
            drafts = tokens[:DRAFTS] if tuple(sessions[0]) == CHUNKS and step == DRAFTED else []
            # longest first, as a step orders its tokens: so rows and tokens are in one order
            order = sorted(range(len(sessions)), key=[-count for count in counts].__getitem__)
            works, parts = [], []
            if drafts:
                pool.extend(stranger, 5)
                works.append(Work(stranger.blocks, 0, tokens[10:15], 2))
            for index in order:
                table, count = tables[index], counts[index]
                start = table.length
                pool.extend(table, count + len(drafts))
                parts.append((sum(work.rows for work in works), start, count))
                read = [*tokens[start : start + count], *drafts]
                works.append(Work(table.blocks, start, read, len(read)))
            prepared = engine.prepare(works)
            if prints is None:
                logits = engine.forward(prepared)
            else:
                keep = prepared.prepared.keep  # the place of each row's token in the pass
                places = [(keep[first : first + count], start) for first, start, count in parts]
                with prints.comparing(sum(len(work.tokens) for work in works), places):
                    logits = engine.forward(prepared)
            for index, (first, start, count) in zip(order, parts, strict=True):
                found[index].append(logits[first : first + count].clone())
                pool.truncate(tables[index], start + count)
    finally:
        for table in (*tables, stranger):
            pool.close(table)
    return [torch.cat(rows) for rows in found]


@contextmanager
def _told(info: ModelInfo, model: Any, what: str) -> Iterator[RunningModules]:
    """Turns whatever a model makes of a call in here into a refusal that names the module and the cause."""
    with RunningModules(model) as modules:
        try:
            yield modules
        except ModelRefused as refusal:
            raise _refused(info, refusal.message) from None
        except PeerLost:
            raise
        except Exception as error:  # a model may do anything with a call that it does not expect
            if of_the_group(error):
                raise PeerLost("a process of the tensor-parallel group ended") from error
            where = modules.named(modules.running)
            raise _refused(info, f"{what}: {where} raises {in_one_line(error)}") from error


@contextmanager
def _noise(model: Any) -> Iterator[None]:
    """Changes what a fresh model has all alike, norms, biases and corrections, for the time of a check."""
    generator = torch.Generator().manual_seed(7)
    before = [
        (tensor, tensor.clone())
        for tensor in model.state_dict().values()
        if tensor.dim() == 1 and tensor.is_floating_point()
    ]
    with torch.inference_mode():
        for tensor, plain in before:
            size = float(plain.square().mean().sqrt()) or 1.0
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor) * (NOISE * size))
    try:
        yield
    finally:
        with torch.inference_mode():
            for tensor, plain in before:
                tensor.copy_(plain)


def check_tokens(info: ModelInfo, text: int = 0) -> list[int]:
    """Returns a text of LENGTH tokens."""
    rng = random.Random(20 + text)
    return [rng.randrange(info.vocab_size) for _ in range(LENGTH)]


def _forgetful_layer(model: Any, engine: Engine) -> int | None:
    """Returns a layer that attends without a window, and whose keys transformers' cache keeps for a window
    only."""
    kept = DynamicCache(config=model.config).layers
    windowless = [
        layer for layer, how in engine.attention.layers.items() if how.window is None and how.chunk is None
    ]
    return next((i for i in windowless if i < len(kept) and getattr(kept[i], "is_sliding", False)), None)


def _keeps_state(model: Any) -> bool:
    """Returns whether a layer keeps state. A class may be able to have such layers, and have none."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    if not kinds:
        return bool(getattr(model, "_is_stateful", False)) and not recurrent_layers.are_in(model)
    if "conv" in kinds and any(map(short_convolution.is_short_convolution, model.modules())):
        kinds = {*kinds} - {"conv"}
    if recurrent_layers.are_in(model):
        kinds = {*kinds} - {"linear_attention", "hybrid"}  # these attend, too
    return any("attention" not in kind or "linear" in kind for kind in {*kinds} - STATELESS - indexer.KINDS)


def _attending_layers(model: Any) -> int:
    text = model.config.get_text_config()
    kinds = getattr(text, "layer_types", None) or [""] * text.num_hidden_layers
    return sum(kind not in STATELESS for kind in kinds)


def _bare(modules: RunningModules) -> frozenset[nn.Module]:
    """Returns modules that did not run where what holds them did."""
    return frozenset(
        child for module in modules.ran for child in module.children() if child not in modules.ran
    )


def _refused(info: ModelInfo, reason: str) -> ModelRefused:
    return ModelRefused(f"{info.architecture} ({info.name}) cannot be served exactly: {reason}")
