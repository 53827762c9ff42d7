"""What the engine reaches on a GPU: everything in one command, in 25 minutes at most (`--minutes`).

    python benchmarks/gpu.py --write benchmarks/results/gpu-NAME.json

Measures the device's ceilings (a large copy, a large matrix product), the attention kernels at hand against
one another, the cost T(n) of a step with n tokens on a target of the shape of Llama 3.1 8B, how much of the
copy's bandwidth a single stream reaches, how long the device waits for the host between two steps, and tokens
a second at several batch sizes with and without drafts. The large target's weights are random and made on the
device: what a step costs does not depend on them. Exactness is measured on the demo target, which is trained.

There drafts cost nothing and are accepted by the toss of a coin, at the given rate: the figures are those of
the target's side, planning and messages apart. What the whole service makes of a target of that size and its
trained draft comes last (`--ways`), and if memory grows while streams come and go. `--device cpu` runs tiny
models through the same code.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM, LlamaConfig

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_generate import GREEDY, exactness, generate_rate
from benchmarks.gpu_report import show
from benchmarks.gpu_service import LARGE as SERVED
from benchmarks.gpu_service import TINY as SERVED_TINY
from benchmarks.gpu_service import WAYS, named, serve
from benchmarks.gpu_timing import Budget, Device, attention_cases, host_and_device_seconds
from benchmarks.keep import ROOT, Write, keep
from benchmarks.soak import least_seconds
from outrider.engine.assembly import build_engine
from outrider.engine.engine import Engine, Work
from outrider.engine.flat_inputs import SIZES
from outrider.engine.fusing import is_fused
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import describe
from outrider.engine.packed import PackedLinear
from outrider.engine.parts import GATHERED, Parts, usual
from outrider.errors import OutriderError
from outrider.sampling.sampler import Row

CONSOLE = Console()


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    config: dict[str, int]
    draft: dict[str, int]  # what a draft model's differs in
    copy_bytes: int
    matrix: int  # side of the square matrices that are multiplied
    context: int  # tokens in the cache of each session
    step_tokens: tuple[int, ...]
    batches: tuple[int, ...]
    steps: int  # that each batch runs
    repeats: int
    kernel_cases: tuple[tuple[int, int, int], ...]  # sessions, tokens of each, tokens in the cache


LARGE = Scale(
    {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
    {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    2**33,
    8192,
    1024,
    (1, 2, 3, 5, 8, 9, 16, 32, 33, 64, 128, 192, 256, 320, 384, 512),
    (1, 8, 32, 128),
    64,
    20,
    ((1, 1, 256), (1, 5, 256), (1, 1, 4096), (32, 5, 1024), (128, 1, 1024), (128, 4, 1024)),
)
ENGINE_SHARE = 0.5  # of the time, for targets of random weights
BFLOAT16, DRAFT, TORCH = "bfloat16", "draft", "torch"
KINDS = {
    BFLOAT16: "in bfloat16",
    "fp8": "with weights of 8 bits in floating point",
    "int8": "with weights of 8 bits",
    DRAFT: "in bfloat16, of the shape of Llama 3.2 1B",
    TORCH: "in bfloat16, products by torch, layers compiled by it",
}
ON_CPU = (BFLOAT16, DRAFT, TORCH)  # weights of 8 bits are for GPUs here
KNOWN, SERVING = ",".join(KINDS), ",".join(WAYS)
TINY = Scale(
    {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 199,
        "max_position_embeddings": 256,
    },
    {"num_hidden_layers": 1},
    2**20,
    64,
    24,
    (1, 2, 4),
    (1, 2),
    4,
    2,
    ((1, 1, 20), (2, 3, 20)),
)


def random_target(
    scale: Scale, device: Device, drafts: int, kind: str, tell: Callable[[str], None]
) -> Engine:
    """Returns an engine on random weights, with room for every batch."""
    shape = {**scale.config, **(scale.draft if kind == DRAFT else {})}
    config = LlamaConfig(**shape, tie_word_embeddings=kind == DRAFT)
    tell(f"making a target of random weights: {KINDS[kind]}")
    torch.manual_seed(0)
    with device.torch:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="eager"
        ).eval()
    model.requires_grad_(False)
    width = config.hidden_size // config.num_attention_heads
    key_bytes = 4 * config.num_key_value_heads * width * config.num_hidden_layers  # of a token
    block = 256  # the largest of the kernels'
    longest = scale.context + (1 + drafts) * (scale.steps + 2)
    room = (-(-longest // block) + 1) * block
    if device.is_gpu:
        parts = usual(device.torch, torch.bfloat16, kind if kind in ("int8", "fp8") else None)
        parts = replace(parts, linears="ordinary") if kind == TORCH else parts
    else:
        parts = Parts(("reference", GATHERED), "called-again", fused=True)
    engine = build_engine(
        model,
        describe(model, "random", "random", str(device.torch)),
        key_bytes * room * (max(scale.batches) + 1),
        parts,
        progress=lambda stage, share: tell(f"{stage} {share:.0%}"),
    )
    if engine.runner.name != "replayed":
        raise SystemExit("the engine runs without attention kernel or recorded steps here; the log says why")
    return engine


def opened(engine: Engine, sessions: int, length: int) -> list[BlockTable]:
    """Returns sessions of that many tokens, whose keys are whatever the pool holds."""
    tables = [BlockTable() for _ in range(sessions)]
    for table in tables:
        engine.pool.extend(table, length)
    return tables


def next_step(engine: Engine, tables: list[BlockTable], tokens: int) -> tuple[list[Work], list[Row]]:
    """Returns each session's next `tokens` tokens, whose slots are taken."""
    works, rows = [], []
    for index, table in enumerate(tables):
        start = table.length
        engine.pool.extend(table, tokens)
        ids = [(start * 31 + index * 7 + i) % engine.info.vocab_size for i in range(tokens)]
        works.append(Work(table.blocks, start, ids, tokens))
        rows += [Row(GREEDY, start + i + 1, None, ()) for i in range(tokens)]
    return works, rows


def as_trees(engine: Engine, works: list[Work], tables: list[BlockTable]) -> list[Work]:
    """Returns the same tokens with every session's drafts as a tree: a path of half of them, with another
    token beside each."""
    found = []
    for work, table in zip(works, tables, strict=True):
        drafts = len(work.tokens) - 1
        line = drafts - drafts // 2
        parents = [*range(-1, line - 1), *range(-1, drafts // 2 - 1)]
        assert engine.attention.lay_out is not None
        places = [place or 0 for place in engine.attention.lay_out(work.start, work.start + 1, parents)]
        engine.pool.extend(table, max(0, max(places) + 1 - table.length))
        found.append(work._replace(blocks=table.blocks, parents=parents, places=places))
    return found


def tree_over_path(engine: Engine, scale: Scale, device: Device, sessions: int, drafts: int) -> float | None:
    """Returns how much longer a step takes if each session's drafts are a tree, as a ratio; None = no tree is
    possible."""
    if engine.attention.lay_out is None or drafts < 2:
        return None
    tables = opened(engine, sessions, scale.context)
    works, rows = next_step(engine, tables, 1 + drafts)
    path, _ = host_and_device_seconds(engine, works, rows, device, scale.repeats)
    trees = as_trees(engine, works, tables)
    tree, _ = host_and_device_seconds(engine, trees, rows, device, scale.repeats)
    close(engine, tables)
    return tree / path


def close(engine: Engine, tables: list[BlockTable]) -> None:
    for table in tables:
        engine.pool.close(table)


def curve(
    engine: Engine, scale: Scale, device: Device, tell: Callable[[str], None]
) -> dict[int, dict[str, float]]:
    """Returns T(n): the seconds of a step with n tokens, of up to max(batches) sessions."""
    found = {}
    for tokens in scale.step_tokens:
        tell(f"a step of {tokens} tokens")
        sessions = max(n for n in range(1, max(scale.batches) + 1) if tokens % n == 0)
        tables = opened(engine, sessions, scale.context)
        works, rows = next_step(engine, tables, tokens // sessions)
        wall, busy = host_and_device_seconds(engine, works, rows, device, scale.repeats)
        found[len(rows)] = {"seconds": wall, "device_seconds": busy, "host_gap": max(0.0, 1 - busy / wall)}
        close(engine, tables)
    return found


def step_bytes(engine: Engine, context: int) -> int:
    """Returns the bytes that a step of one token reads: all weights but the embedding's other rows, and the
    session's keys."""
    held = list(engine.model.get_output_embeddings().parameters())
    for module in engine.model.modules():
        if isinstance(module, PackedLinear):  # the same one may stand at several places
            held += [module.packed]
    held += [p for name, p in engine.model.named_parameters() if "embed_tokens" not in name]
    weights: int = sum(tensor.nbytes for tensor in {tensor.data_ptr(): tensor for tensor in held}.values())
    cached: int = context * engine.attention.pools.bytes_per_block // engine.pool.block_size
    return weights + cached


def rate(
    engine: Engine, scale: Scale, device: Device, sessions: int, drafts: int, acceptance: float
) -> dict[str, float]:
    """Returns the tokens a second of so many streams, each with so many drafts a step, accepted by the toss
    of a coin."""
    rng = random.Random(sessions)
    tables = opened(engine, sessions, scale.context)
    committed = 0
    seconds = 0.0
    for step in range(scale.steps + 2):
        began = device.now()
        works, rows = next_step(engine, tables, 1 + drafts)
        engine.choose(engine.prepare(works), rows)
        gained = 0
        for table in tables:
            accepted = 0
            while accepted < drafts and rng.random() < acceptance:
                accepted += 1
            gained += 1 + accepted
            engine.pool.truncate(table, table.length - drafts + accepted)
        if step >= 2:  # the first two warm
            seconds += device.now() - began
            committed += gained
    close(engine, tables)
    return {"tokens_per_second": committed / seconds, "tokens_per_step": committed / scale.steps / sessions}


def rates(
    engine: Engine,
    scale: Scale,
    device: Device,
    drafts: int,
    acceptance: float,
    tell: Callable[[str], None],
) -> dict[int, dict[str, Any]]:
    found = {}
    for sessions in scale.batches:
        tell(f"{sessions} streams")
        plain = rate(engine, scale, device, sessions, 0, acceptance)
        fitting = min(drafts, SIZES[-1] // sessions - 1)  # in a step that is recorded
        drafted = rate(engine, scale, device, sessions, fitting, acceptance)
        found[sessions] = {
            "draft_tokens": fitting,
            "plain": plain,
            "drafts": drafted,
            "speedup": drafted["tokens_per_second"] / plain["tokens_per_second"],
            "tree_step_over_path_step": tree_over_path(engine, scale, device, sessions, fitting),
        }
    return found


def measure(
    device: Device,
    scale: Scale,
    target: Path,
    drafts: int,
    acceptance: float,
    kinds: Sequence[str],
    budget: Budget,
    tell: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yields the result as far as it is known, after each target."""
    result: dict[str, Any] = {"exactness": exactness(device, target, tell)}
    tell("the device's ceilings")
    copied = device.copy_bandwidth(scale.copy_bytes)
    result["ceilings"] = {
        "copy_bytes_per_second": copied,
        "flop_per_second": device.matrix_rate(scale.matrix),
    }
    tell("attention kernels")
    result["attention"] = list(attention_cases(scale.kernel_cases, scale.config, scale.repeats, device))
    result["config"] = {"context": scale.context, **scale.config, "draft": scale.draft}
    result["drafts"] = {"acceptance": acceptance, "accepted_by": "the toss of a coin"}
    result["targets"] = {}
    for kind in kinds:
        if not budget.allows(kind, ENGINE_SHARE):
            continue
        engine = random_target(scale, device, drafts, kind, tell)
        found: dict[str, Any] = {
            "parameters": engine.info.parameters,
            "kernel": engine.attention.name,
            "linears": engine.linears.name,
            "compiled": is_fused(engine.model),
            "bit_exact": engine.info.bit_exact,
            "curve": curve(engine, scale, device, tell),
        }
        single, read = found["curve"][1], step_bytes(engine, scale.context)
        found["single_stream"] = {
            "bytes": read,
            "share_of_copy_bandwidth": read / single["seconds"] / copied,
            "host_gap": single["host_gap"],
        }
        found["batches"] = rates(engine, scale, device, drafts, acceptance, tell)
        result["targets"][kind] = found
        if kind == TORCH:
            generated = generate_rate(engine, device, scale.context, scale.steps // 2, tell)
            result["generate_tokens_per_second"] = generated
        del engine
        device.forget()
        yield result


def main(
    device: Annotated[str, typer.Option(help="cuda, cuda:N, or cpu: a dry run with a tiny model.")] = "cuda",
    target: Annotated[Path, typer.Option(help="Trained checkpoint for the check of exactness.")] = ROOT
    / "demo/models/target",
    drafts: Annotated[int, typer.Option(min=1, max=31, help="Draft tokens of a stream in a step.")] = 4,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="How often a draft is right.")] = 0.8,
    kinds: Annotated[str, typer.Option(help="Which targets, with commas between; torch comes last.")] = KNOWN,
    ways: Annotated[str, typer.Option(help="Which ways of serving, beside plain; empty = none.")] = SERVING,
    draft: Annotated[Path, typer.Option(help="Its trained draft model, to serve with.")] = ROOT
    / "demo/models/draft",
    churn_seconds: Annotated[float, typer.Option(min=0, help="For which streams come and go.")] = 300.0,
    minutes: Annotated[float, typer.Option(min=0, help="After which nothing more begins.")] = 25.0,
    write: Write = None,
) -> None:
    """Measure the engine on a GPU."""
    logging.basicConfig(level=logging.WARNING)
    if 0 < churn_seconds < least_seconds():
        raise SystemExit(f"--churn-seconds must be at least {least_seconds():g}, or 0 for none")
    budget = Budget(minutes)
    chosen = Device.named(device)
    targets = named("--kinds", kinds, KINDS)
    if not chosen.is_gpu:
        targets = [kind for kind in targets if kind in ON_CPU]
    names = named("--ways", ways, WAYS)
    result: dict[str, Any] = {"device": asdict(chosen.about())}
    try:
        with Progress(console=CONSOLE, transient=True) as progress:
            task = progress.add_task("starting", total=None)

            def tell(stage: str) -> None:
                progress.update(task, description=stage)

            scale, served = (LARGE, SERVED) if chosen.is_gpu else (TINY, SERVED_TINY)
            if targets:
                for found in measure(chosen, scale, target, drafts, acceptance, targets, budget, tell):
                    result |= found
                    keep(write, result)
            if names:
                for serving in serve(names, target, draft, served, chosen, churn_seconds, budget, tell):
                    result["service"] = serving
                    keep(write, result)
            result["left_out"] = budget.left_out
            keep(write, result)
    except OutriderError as error:
        raise SystemExit(error.message) from None
    show(result, CONSOLE)


if __name__ == "__main__":
    typer.run(main)
