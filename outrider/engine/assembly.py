"""From a loaded model to an engine that has shown that it runs it rightly, made of the parts that are asked
for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from outrider.engine.branch_check import branches_agree
from outrider.engine.engine import Engine
from outrider.engine.fusing import fused
from outrider.engine.group import Alone
from outrider.engine.kernel_choice import with_kernel
from outrider.engine.kv_memory import with_all_blocks
from outrider.engine.linear_layers import LinearLayers
from outrider.engine.native_attention import keeping_bits
from outrider.engine.numerics import numerics
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.parts import CALLS, GATHERED, LINEARS, MEASURED, NATIVE, RECORDS, Parts, kernels
from outrider.engine.plain_pass import runs_plainly
from outrider.engine.process_memory import give_back_freed_memory, keep_freed_memory, use_huge_pages
from outrider.engine.rank_group import RankGroup
from outrider.engine.ranks import Ranks
from outrider.engine.recording_check import check_recorded
from outrider.engine.replayed import recorded
from outrider.engine.runner import CallByCall
from outrider.engine.self_check import (
    PROBE_BLOCKS,
    Reference,
    check,
    check_rounded,
    kernels_keep_bits,
    reference,
    same_bits,
)
from outrider.engine.sharding import connect, localize
from outrider.errors import StartupError
from outrider.options.memory import Share
from outrider.wire.description import ModelInfo

WORTH_HUGE_PAGES = 2**26  # bytes of weights: more than the caches next to a core hold


def build_engine(
    model: Any,
    info: ModelInfo,
    kv_memory_bytes: int | Share,
    parts: Parts,
    *,
    progress: Callable[[str, float], None],
    ranks: Ranks | None = None,
    vocabulary: torch.Tensor | None = None,
    resting_threads: int | None = None,
) -> Engine:
    """Returns an engine on a loaded model, once it has given what the model's own code gives.

    The model is checked with gathered attention first, whatever is asked for: a kernel that fails is no fault
    of the model's. `vocabulary` as Engine has it, `resting_threads` as load_engine. Raises as that does."""
    tell = progress
    keep_freed_memory()
    tell("running the model's own code", 0.5)
    expected = reference(model, info)
    joints = localize(model) if ranks is not None else []
    linears = LINEARS[parts.linears]
    if linears.keeps_numbers:
        tell("packing weights", 0.6)
        _put_in(linears, model, ranks, expected)
    tell("checking the engine against it", 0.8)
    if ranks is not None:
        connect(model, joints, ranks)
    ranked = RankGroup(ranks, info.vocab_size) if ranks is not None else None
    group = ranked or Alone(info.vocab_size if vocabulary is None else len(vocabulary))
    probe = Engine(model, info, keeping_bits(model, PROBE_BLOCKS, NATIVE in parts.attention), group, linears)
    on_cpu = next(model.parameters()).device.type == "cpu"  # where it is measured with gathered keys
    checked = check(probe, expected, bits=on_cpu and linears.keeps_bits and linears.keeps_numbers)
    gathering = probe
    if parts.attention[0] not in MEASURED:
        probe = _with_kernel(probe, expected, parts)
    if not linears.keeps_numbers:
        tell("rounding weights", 0.85)
        _put_in(linears, model, ranks, expected)
        checked, off = check_rounded(gathering, expected, linears.name, bits=on_cpu)
        tell(f"rounded so, logits are {off:.1%} of their size from the model's own", 0.9)
    may_rest = resting_threads is not None and same_bits(gathering, resting_threads)
    attention = with_all_blocks(
        probe.attention, info, kv_memory_bytes, next(model.parameters()).device, group
    )
    checked = replace(checked, bit_exact=group.agree(checked.bit_exact))
    calls = CallByCall(model, attention, group)
    engine = Engine(model, checked, attention, group, linears, calls, vocabulary)
    if parts.fused and attention.fills_shapes and not runs_plainly(model):
        tell("compiling layers", 0.85)
        fused(engine, expected)
    if parts.runner != CALLS and attention.fills_shapes:
        record = RECORDS[parts.runner](calls.device)
        engine.runner = recorded(
            calls,
            checked,
            record,
            lambda share: tell("recording steps", 0.9 + 0.1 * share),
            vocabulary=vocabulary,
        )
        if engine.runner is not calls:
            check_recorded(engine, calls, expected)
    if linears.keeps_bits and attention.fills_shapes:
        tell("comparing rows alone and in company", 1.0)
        engine.info = checked = replace(checked, bit_exact=group.agree(kernels_keep_bits(engine)))
    if isinstance(attention, PagedAttention) and attention.lay_out is not None:
        attention.takes_trees = group.agree(branches_agree(engine))
    engine.info = replace(checked, numerics=numerics(engine))
    if may_rest and resting_threads is not None:
        engine.resting_threads = resting_threads
    if ranked is not None:
        ranked.ranks.settle()
        if ranked.ranks.leads:
            ranked.lead()
    give_back_freed_memory()
    weights = info.parameters * next(model.parameters()).element_size()
    if calls.device.type == "cpu" and weights >= WORTH_HUGE_PAGES:
        use_huge_pages()  # which takes some seconds, for as many gigabytes
    tell("ready", 1.0)
    return engine


def _put_in(linears: LinearLayers, model: Any, ranks: Ranks | None, expected: Reference) -> None:
    linears.put_into(model, expected.bare)
    if ranks is None:  # else modules have hooks, at which ranks meet
        linears.run_plainly(model)


def _with_kernel(probe: Engine, expected: Reference, parts: Parts) -> Engine:
    """Raises StartupError where no kernel works, unless gathering is among what is asked for."""
    found = with_kernel(probe, expected, kernels(parts.attention))
    if found is probe and GATHERED not in parts.attention:
        asked = ", ".join(parts.attention)
        raise StartupError(f"attention by {asked} does not work for {probe.info.name} here; add {GATHERED}")
    return found
