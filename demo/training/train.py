"""Train the demonstration pair: a target, a draft distilled from it, and their tokenizer.

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
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from demo.pair import MODELS
from demo.training.attention import choose_attention
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
from demo.training.store import folder_bytes, load_model, rounded, save_model
from demo.training.vocabulary import train_tokenizer

MUTUAL_KEPT = (0.4, 0.65)  # a turn each: the share of its old weights in the target's average at the end
Stage = Literal["all", "pretrain", "distil", "mutual", "refine", "measure"]


def keep_freed_memory() -> None:
    """Have glibc keep freed memory: big tensors would else fault their pages in anew at every step."""
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)
        libc.mallopt(top_pad, 2**28)
    except (OSError, AttributeError):
        pass  # another C library: only slower


def run_pretrain(
    tokenizer: PreTrainedTokenizerFast,
    windows: Windows,
    steps: int,
    seed: int,
    out: Path,
    device: torch.device,
) -> None:
    """Target and draft from random weights on the corpus, written to `out`."""
    target = build(target_config(len(tokenizer)), seed).to(device)
    draft = build(draft_config(len(tokenizer)), seed + 1).to(device)
    for model in (target, draft):
        model.set_attn_implementation(choose_attention(device))
    pretrain(target, draft, windows, PretrainOptions(steps))
    save_model(target, tokenizer, out / "target")
    save_model(draft, tokenizer, out / "draft")


def run_distil(
    tokenizer: PreTrainedTokenizerFast,
    windows: Windows,
    options: DistilOptions,
    seed: int,
    out: Path,
    device: torch.device,
) -> None:
    """The draft on what the written (rounded) target says, after corpus prompts."""
    target, draft = rounded(load_model(out / "target")).to(device), load_model(out / "draft").to(device)
    for model in (target, draft):
        model.set_attn_implementation(choose_attention(device))
    distil(target, draft, windows, options, seed)
    save_model(draft, tokenizer, out / "draft")


def run_mutual(
    tokenizer: PreTrainedTokenizerFast,
    windows: Windows,
    options: MutualOptions,
    seed: int,
    out: Path,
    device: torch.device,
) -> None:
    """The written target and draft on each other."""
    target, draft = load_model(out / "target").to(device), load_model(out / "draft").to(device)
    for model in (target, draft):
        model.set_attn_implementation(choose_attention(device))
    mutual(target, draft, windows, options, seed)
    save_model(target, tokenizer, out / "target")
    save_model(draft, tokenizer, out / "draft")


def report(figures: Figures, target: LlamaForCausalLM, draft: LlamaForCausalLM, out: Path) -> None:
    """Print the figures and write them to figures.json beside the models."""
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
    (out / "figures.json").write_text(json.dumps(figures.as_dict(), indent=2) + "\n")
    CONSOLE.print(f"{out}: {folder_bytes(out) / 1e6:.2f} MB")


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
    if stage in ("all", "pretrain"):
        run_pretrain(tokenizer, Windows(stream, seed), steps, seed, out, device)
    if stage in ("all", "distil"):
        run_distil(tokenizer, Windows(stream, seed + 1), DistilOptions(rounds), seed + 2, out, device)
    if stage in ("all", "mutual"):
        for turn, kept in enumerate(MUTUAL_KEPT):
            after = seed + 4 * turn
            options = MutualOptions(DistilOptions(mutual_rounds), kept)
            run_mutual(tokenizer, Windows(stream, after + 3), options, after + 4, out, device)
    if stage in ("all", "refine"):
        last = DistilOptions(last_rounds, rate=3e-3)
        run_distil(tokenizer, Windows(stream, seed + 5), last, seed + 6, out, device)
    if stage in ("all", "measure"):
        target, draft = load_model(out / "target").to(device), load_model(out / "draft").to(device)
        heldout = encode_stream(tokenizer, heldout_documents(), seed)
        report(measure(target, draft, tokenizer, heldout), target, draft, out)
    CONSOLE.print(f"{(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    typer.run(main)
