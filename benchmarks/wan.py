"""Tokens a second with a long line between drafter and verifier.

    python benchmarks/wan.py --target GROWN --draft demo/models/draft --write benchmarks/results/NAME.json

Router, verifier and drafter run on hosts of their own (network namespaces, so it needs root), and every
packet between drafter and verifier passes a relay (tests/cluster/relay.py). One service is asked three ways
in turn, group by group: with drafts over a line without delay, with drafts over the long line, and without
drafts (`num_speculative_tokens` 0). Whatever else the machine does falls on all three. The prompts of a
group are read once before, so that what is measured is decoding. Reports medians and quartiles over groups,
and whether the three gave the same text.
"""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.speedup import CONSOLE, machine, show, spread
from demo.heldout import heldout_prompts
from tests.cluster.by_hand import address, roles
from tests.cluster.client import Answer, HostClient, Request
from tests.cluster.hosts import switched
from tests.cluster.namespace import missing
from tests.cluster.relay import Line, Relay, relayed

WAYS = ("near", "far", "plain")


def rate(answers: list[Answer]) -> float:
    """Tokens a second of a group that ran together."""
    return sum(answer.told.completion_tokens for answer in answers) / max(
        answer.told.seconds for answer in answers
    )


def measure(
    client: HostClient, relay: Relay, far: Line, groups: list[list[Request]]
) -> dict[str, list[list[Answer]]]:
    """What each of WAYS answered, by group."""
    lines = {"near": Line(), "far": far, "plain": Line()}
    answers: dict[str, list[list[Answer]]] = {way: [] for way in WAYS}
    client.ask_together(groups[0])  # wakes everything up
    for number, group in enumerate(track(groups, "Asking three ways in turn", console=CONSOLE)):
        client.ask_together([{**request, "max_tokens": 1} for request in group])  # reads the prompts
        turn = number % len(WAYS)
        for way in WAYS[turn:] + WAYS[:turn]:
            relay.become(lines[way])
            limit = {"num_speculative_tokens": 0} if way == "plain" else {}
            answers[way].append(client.ask_together([{**request, **limit} for request in group]))
    return answers


def report(answers: dict[str, list[list[Answer]]]) -> dict[str, object]:
    rates = {way: [rate(group) for group in answers[way]] for way in WAYS}
    flat = {way: [answer for group in answers[way] for answer in group] for way in WAYS}
    accepted = {
        way: [one.told.acceptance_rate for one in flat[way] if one.told.acceptance_rate is not None]
        for way in ("near", "far")
    }
    return {
        **{f"tokens_per_second_{way}": spread(rates[way]) for way in WAYS},
        "near_over_plain": spread([a / b for a, b in zip(rates["near"], rates["plain"], strict=True)]),
        "far_over_plain": spread([a / b for a, b in zip(rates["far"], rates["plain"], strict=True)]),
        "far_over_near": spread([a / b for a, b in zip(rates["far"], rates["near"], strict=True)]),
        **{f"draft_acceptance_rate_{way}": spread(values or [0.0]) for way, values in accepted.items()},
        **{f"share_with_drafts_{way}": len(values) / len(flat[way]) for way, values in accepted.items()},
        "same_text": all(len({one.text for one in same}) == 1 for same in zip(*flat.values(), strict=True)),
        "groups": [dict(zip(WAYS, group, strict=True)) for group in zip(*rates.values(), strict=True)],
    }


def main(
    target: Annotated[str, typer.Option(help="Folder of the target.")] = "demo/models/target",
    draft: Annotated[str, typer.Option(help="Folder of the draft model.")] = "demo/models/draft",
    rtt_ms: Annotated[float, typer.Option(min=0, help="Round trip between drafter and verifier.")] = 20.0,
    groups: Annotated[int, typer.Option(min=2, help="Groups of prompts asked each way.")] = 9,
    streams: Annotated[int, typer.Option(min=1, help="Prompts in a group, asked at the same time.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 = greedy.")] = 0.0,
    write: Annotated[Path | None, typer.Option(help="File to keep the result in, as JSON.")] = None,
) -> None:
    """Compare a drafter far away to one near by and to none."""
    if reason := missing():
        raise SystemExit(f"this benchmark makes hosts out of network namespaces: {reason}")
    load_before = os.getloadavg()[0]  # of the last minute: what else the machine did
    prompts = heldout_prompts(groups * streams)
    requests: list[Request] = [
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": 1,
            "ignore_eos": True,
        }
        for prompt in prompts
    ]
    with (
        switched("front", "draft", "target", "client") as hosts,
        relayed(hosts["draft"], hosts["target"], Line()) as relay,
        roles(hosts["front"]) as service,
    ):
        workers = {
            "verifier": service.verifier(hosts["target"], target),
            "drafter": service.drafter(hosts["draft"], draft),
        }
        for role, worker in workers.items():
            address(worker, role)
        client = HostClient(hosts["client"], service.url)
        asked = [requests[start : start + streams] for start in range(0, len(requests), streams)]
        answers = measure(client, relay, Line(delay_ms=rtt_ms / 2), asked)
    result = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "load_before": load_before,
        "versions": {name: version(name) for name in ("torch", "transformers", "grpcio")},
        "streams": streams,
        "rtt_ms": rtt_ms,
        **report(answers),
    }
    show(result)
    if write is not None:
        write.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
