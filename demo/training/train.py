"""Trains the demonstration pair: a target, a draft distilled from it, and their tokenizer.

    python demo/training/train.py

does everything: tokenizer, target and draft on the corpus, draft on the target's own text, both on each
other, the draft once more on the text of the target as it has become, figures.
The stages can be run one at a time with --stage; each begins from what the one before wrote.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table
from transformers import LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from demo.pair import MODELS
from demo.training.corpus import Windows, encode_stream, heldout_documents, training_documents
from demo.training.distil import DistilOptions, distil
from demo.training.measure import Figures, measure
from demo.training.mutual import MutualOptions, mutual
from demo.training.pretrain import PretrainOptions, pretrain
from demo.training.progress import CONSOLE
from demo.training.shapes import (
    CONTEXT,
    build,
    draft_config,
    matmul_parameters,
    parameter_count,
    target_config,
)
from demo.training.store import Store, rounded
from demo.training.vocabulary import train_tokenizer

MUTUAL_KEPT = (0.4, 0.65)  # a turn each: the share of its old weights in the target's average at the end
Stage = Literal["all", "pretrain", "distil", "mutual", "refine", "measure"]


def keep_freed_memory() -> None:
    """Has glibc keep freed memory: big tensors would else fault their pages in anew at every step."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 2**28)
    except (OSError, AttributeError):
        pass  # another C library: only slower


def report(figures: Figures, target: LlamaForCausalLM, draft: LlamaForCausalLM, out: Path) -> None:
    """Prints the figures and writes them to figures.json beside the models."""
    cost = matmul_parameters(draft) / matmul_parameters(target)
    table = Table("figure", "target", "draft")
    table.add_row("parameters", f"{parameter_count(target):,}", f"{parameter_count(draft):,}")
    table.add_row("matmul parameters", f"{matmul_parameters(target):,}", f"{matmul_parameters(draft):,}")
    table.add_row("compute ratio", "1", f"{cost:.4f}")
    table.add_row("held-out loss", f"{figures.target_loss:.4f}", f"{figures.draft_loss:.4f}")
    perplexities = (f"{math.exp(loss):.2f}" for loss in (figures.target_loss, figures.draft_loss))
    table.add_row("held-out perplexity", *perplexities)
    table.add_row(
        f"greedy acceptance ({figures.greedy_positions} positions)", "", f"{figures.greedy_acceptance:.4f}"
    )
    table.add_row("tokens a step at k=5", "", f"{figures.tokens_per_step:.3f}")
    table.add_row(
        f"T=1 matches, shared noise ({figures.sampled_positions} positions)",
        "",
        f"{figures.sampled_matches:.4f}",
    )
    table.add_row("T=1 overlap, 1-TV", "", f"{figures.sampled_overlap:.4f}")
    CONSOLE.print(table)
    (out / "figures.json").write_text(json.dumps(asdict(figures), indent=2) + "\n")


def main(
    out: Annotated[Path, typer.Option(help="Folder to write target/ and draft/ to.")] = MODELS,
    stage: Annotated[Stage, typer.Option(help="Run one stage instead of all of them in order.")] = "all",
    steps: Annotated[int, typer.Option(help="Steps of 8192 tokens on the corpus.")] = 800,
    rounds: Annotated[int, typer.Option(help="Rounds of the target's own text for the draft.")] = 68,
    mutual_rounds: Annotated[int, typer.Option(help="Rounds of each turn of both on each other.")] = 8,
    last_rounds: Annotated[int, typer.Option(help="Rounds for the draft after those.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and sampling.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves the choice to PyTorch.")] = 0,
) -> None:
    """Train the target and its draft on the standard library's source, and print their figures."""
    began = time.monotonic()
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    documents = training_documents()
    tokenizer = train_tokenizer(documents, CONTEXT)
    stream = encode_stream(tokenizer, documents, seed)
    CONSOLE.print(
        f"{len(documents)} files, {len(stream):,} tokens of a vocabulary of {len(tokenizer)}, {device}"
    )
    store = Store(out, tokenizer, device)
    if stage in ("all", "pretrain"):
        target, draft = (
            build(config(len(tokenizer)), seed + number).to(device)
            for number, config in enumerate((target_config, draft_config))
        )
        pretrain(target, draft, Windows(stream, seed), PretrainOptions(steps))
        store.save(target, draft)
    if stage in ("all", "distil"):
        target, draft = store.load()
        distil(rounded(target), draft, Windows(stream, seed + 1), DistilOptions(rounds), seed + 2)
        store.save(target, draft)
    if stage in ("all", "mutual"):
        for turn, kept in enumerate(MUTUAL_KEPT):
            after = seed + 4 * turn
            target, draft = store.load()
            options = MutualOptions(DistilOptions(mutual_rounds), kept)
            mutual(target, draft, Windows(stream, after + 3), options, after + 4)
            store.save(target, draft)
    if stage in ("all", "refine"):
        target, draft = store.load()
        last = DistilOptions(last_rounds, rate=3e-3)
        distil(rounded(target), draft, Windows(stream, seed + 5), last, seed + 6)
        store.save(target, draft)
    if stage in ("all", "measure"):
        target, draft = store.load()
        heldout = encode_stream(tokenizer, heldout_documents(), seed)
        report(measure(target, draft, tokenizer, heldout), target, draft, out)
    CONSOLE.print(f"{(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    typer.run(main)
