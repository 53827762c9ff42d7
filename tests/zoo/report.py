"""The page that says which architectures are served, and how. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from tests.zoo.verdict import Outcome, Verdict

HEAD = """# Models

Which architectures Outrider serves. `make zoo` writes this page: every causal-LM architecture of transformers
{version} as a tiny random checkpoint in its true shape, loaded on a CPU, its greedy text in ragged batches
with drafts held against `generate`, and its bits compared in steps of many sizes, alone and in company. So it
says what an architecture's code does here, not how good a model is. A checkpoint is checked in the same way
whenever it is loaded.

{counts}

**Exact** means bit-exact on a CPU. In bfloat16 that depends on the processor, and is found out whenever a
model is loaded; this was an {machine}. "Yes" means that the logits are those of its own code as far as
its rounding goes; an empty cell was not tried. {seeds}
"""


BFLOAT16 = {Outcome.EXACT: "exact", Outcome.NOT_EXACT: "yes", Outcome.WRONG: "**wrong**"}


@dataclass(frozen=True, slots=True)
class Row:
    model_type: str
    float32: Verdict  # of all seeds the worst
    bfloat16: Verdict | None = None
    seeds: int = 1
    false_claims: int = 0

    def with_seed(self, found: Verdict) -> Row:
        """Returns the row with another checkpoint's verdict taken in: what is worse stands."""
        worse = list(Outcome).index(found.outcome) > list(Outcome).index(self.float32.outcome)
        false = self.false_claims + (found.outcome is Outcome.WRONG)
        return replace(
            self, float32=found if worse else self.float32, seeds=self.seeds + 1, false_claims=false
        )

    def with_bfloat16(self, found: Verdict) -> Row:
        return replace(self, bfloat16=found)


def page(rows: Sequence[Row], seeds: int, machine: str) -> str:
    """Returns it as Markdown. `machine`: on which they were tried."""
    of = {outcome: [row for row in rows if row.float32.outcome is outcome] for outcome in Outcome}
    counts = ", ".join(f"{len(of[outcome])} {outcome.value}" for outcome in Outcome)
    said = ""
    if seeds > 1:
        tried = sum(row.seeds for row in rows if row.seeds > 1)
        false = sum(row.false_claims for row in rows)
        said = (
            f"Of {tried} checkpoints, up to {seeds} of each, {false} were called exact and were not "
            f"(`make zoo ARGS=--seeds={seeds}`)."
        )
    told = [
        HEAD.format(
            version=version("transformers"), counts=f"Of {len(rows)}: {counts}.", seeds=said, machine=machine
        )
    ]
    served = [row for outcome in (Outcome.EXACT, Outcome.NOT_EXACT, Outcome.WRONG) for row in of[outcome]]
    if served:
        told += ["## Served\n", "| `model_type` | class | float32 on a CPU | bfloat16 |", "|---|---|---|---|"]
        told += [_served(row) for row in sorted(served, key=lambda row: row.model_type)]
    for title, outcome in (("Refused", Outcome.REFUSED), ("Not tried", Outcome.UNTRIED)):
        if of[outcome]:
            told += [f"\n## {title}\n", "| `model_type` | why |", "|---|---|"]
            told += [f"| `{row.model_type}` | {_cell(_cause(row.float32))} |" for row in of[outcome]]
    return "\n".join(told) + "\n"


def _served(row: Row) -> str:
    how = {Outcome.EXACT: "exact", Outcome.NOT_EXACT: "not exact", Outcome.WRONG: "**wrong**"}
    reason = f": {_cause(row.float32)}" if row.float32.reason else ""
    half = row.bfloat16
    coarse = "" if half is None else BFLOAT16.get(half.outcome) or f"no: {_cause(half)}"
    cells = (f"`{row.model_type}`", row.float32.architecture, how[row.float32.outcome] + reason, coarse)
    return f"| {' | '.join(map(_cell, cells))} |"


def _cause(found: Verdict) -> str:
    """Returns the reason without the model's name before it."""
    return found.reason.split("cannot be served exactly: ")[-1].split("is not bit-exact: ")[-1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:220]
