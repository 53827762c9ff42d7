"""The page of models: each in its table, and what is worse of several checkpoints stands."""

from __future__ import annotations

from tests.zoo.report import Row, page
from tests.zoo.verdict import Outcome, Verdict

EXACT = Verdict(Outcome.EXACT, "AForCausalLM")
FALSE = Verdict(Outcome.WRONG, "AForCausalLM", "it is called bit-exact, and is not")
NO = Verdict(Outcome.REFUSED, "BForCausalLM", "BForCausalLM (b) cannot be served exactly: it has | sinks")


def test_tables() -> None:
    rows = [
        Row("a", EXACT).with_seed(EXACT).with_bfloat16(Verdict(Outcome.NOT_EXACT)),
        Row("b", NO),
        Row("d", EXACT).with_bfloat16(EXACT),
        Row("c", Verdict(Outcome.UNTRIED, reason="ImportError: timm")),
    ]
    text = page(rows, 2, "EPYC")
    assert "| `a` | AForCausalLM | exact | yes |" in text and "| `b` | it has \\| sinks |" in text
    assert "| `d` | AForCausalLM | exact | exact |" in text and "this was an EPYC." in text
    assert "| `c` | ImportError: timm |" in text
    assert "Of 2 checkpoints, up to 2 of each, 0 were called" in text and "ARGS=--seeds=2`" in text


def test_a_false_claim_stands_and_is_counted() -> None:
    row = Row("a", EXACT).with_seed(FALSE).with_seed(EXACT)
    assert (row.float32, row.seeds, row.false_claims) == (FALSE, 3, 1)
    assert "**wrong**: it is called bit-exact, and is not" in page([row], 3, "EPYC")


def tables(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("|", "#", "Of "))]


def test_the_rows_of_other_architectures_stay() -> None:
    rows = [Row("a", EXACT), Row("b", NO), Row("w", FALSE), Row("d", EXACT).with_bfloat16(EXACT)]
    before = page(rows, 1, "EPYC")
    again, after = page(rows[:1], 1, "EPYC", before), page([Row("b", EXACT), Row("c", NO)], 1, "EPYC", before)
    assert tables(again) == tables(before) and "tried last: `a`. The other rows are" in again
    assert tables(after) == tables(page([*rows[:1], Row("b", EXACT), *rows[2:], Row("c", NO)], 1, "EPYC"))
