"""The page that says which architectures are served, and how. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from tests.zoo.verdict import Outcome, Verdict

HEAD = """# Models

Which architectures Outrider serves. `make zoo` writes this page: every causal-LM architecture of transformers
{version}, and multimodal ones by their text part, as a tiny random checkpoint in its true shape, loaded on
a CPU; 48 tokens of its greedy text in ragged batches, with drafts and without, through a failover, held
against `generate`; and its bits compared in steps of many sizes, alone and in company. So it says what an
architecture's code does here, not how good a model is. A checkpoint is checked in the same way whenever it is
loaded.

{counts}

**Exact** means bit-exact on a CPU. In bfloat16 that depends on the processor, and is found out whenever a
model is loaded; this was an {machine}. "Yes" means that the logits are those of its own code as far as
its rounding goes; an empty cell was not tried. {seeds}
"""

SERVED = (Outcome.EXACT, Outcome.NOT_EXACT, Outcome.WRONG)
TITLES = {Outcome.REFUSED: "Refused", Outcome.UNTRIED: "Not tried"}  # of their tables
COLUMNS = ("| `model_type` | class | float32 on a CPU | bfloat16 |", "| `model_type` | why |")
HOW = {Outcome.EXACT: "exact", Outcome.NOT_EXACT: "not exact", Outcome.WRONG: "**wrong**"}
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


def page(
    rows: Sequence[Row], seeds: int, machine: str, before: str = "", last: Sequence[str] | None = None
) -> str:
    """Returns it as Markdown. `machine`: on which they were tried. `before`: a page whose other rows stay;
    `last`: what was tried last then, the rows' types by default."""
    of: dict[Outcome, dict[str, str]] = {outcome: {} for outcome in Outcome}  # lines by type
    new = {row.model_type for row in rows}
    for outcome, model_type, line in _lines(before):
        if model_type not in new:
            of[outcome][model_type] = line
    for row in rows:
        outcome = row.float32.outcome
        of[outcome][row.model_type] = _served(row) if outcome in SERVED else _refused(row)
    counts = ", ".join(f"{len(of[outcome])} {outcome.value}" for outcome in Outcome)
    said = ""
    if seeds > 1:
        tried = sum(row.seeds for row in rows if row.seeds > 1)
        false = sum(row.false_claims for row in rows)
        said = (
            f"Of {tried} checkpoints, up to {seeds} of each, {false} were called exact and were not "
            f"(`make zoo ARGS=--seeds={seeds}`)."
        )
    if before:
        names = ", ".join(f"`{name}`" for name in (sorted(new) if last is None else last))
        said = (
            f"So much is true of what was tried last: {names}. The other rows are of earlier runs, on the "
            "processor of then, which asked what `make zoo` asked then."
        )
    told = [
        HEAD.format(
            version=version("transformers"),
            counts=f"Of {sum(map(len, of.values()))}: {counts}.",
            seeds=said,
            machine=machine,
        )
    ]
    served = {name: line for outcome in SERVED for name, line in of[outcome].items()}
    if served:
        told += ["## Served\n", COLUMNS[0], "|---|---|---|---|"]
        told += [served[name] for name in sorted(served)]
    for outcome, title in TITLES.items():
        if of[outcome]:
            told += [f"\n## {title}\n", COLUMNS[1], "|---|---|"]
            told += [of[outcome][name] for name in sorted(of[outcome])]
    return "\n".join(told) + "\n"


def _lines(text: str) -> Iterator[tuple[Outcome, str, str]]:
    """Yields the rows of a page: outcome, type and line."""
    titles = {title: outcome for outcome, title in TITLES.items()}
    section = ""
    for line in text.splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `") and line not in COLUMNS:
            cells = line.removeprefix("| ").split(" | ")
            yield titles.get(section) or _outcome(cells[2]), cells[0].strip("`"), line


def _outcome(cell: str) -> Outcome:
    """Returns the outcome that a cell of a served row tells of."""
    return next(outcome for outcome, word in HOW.items() if cell.partition(":")[0] == word)


def _refused(row: Row) -> str:
    return f"| `{row.model_type}` | {_cell(_cause(row.float32))} |"


def _served(row: Row) -> str:
    reason = f": {_cause(row.float32)}" if row.float32.reason else ""
    half = row.bfloat16
    coarse = "" if half is None else BFLOAT16.get(half.outcome) or f"no: {_cause(half)}"
    cells = (f"`{row.model_type}`", row.float32.architecture, HOW[row.float32.outcome] + reason, coarse)
    return f"| {' | '.join(map(_cell, cells))} |"


def _cause(found: Verdict) -> str:
    """Returns the reason without the model's name before it."""
    return found.reason.split("cannot be served exactly: ")[-1].split("is not bit-exact: ")[-1]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:220]
