"""`outrider plan` as it is typed and read."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider_cli.app import app
from outrider_cli.sizing import ratio
from outrider_cli.speedup import Pair, expect

NEEDED = {"--target-step-ms": "13", "--draft-token-ms": "1.5", "--acceptance": ".8", "--rtt-ms": "1"}


def plan(**more: str) -> tuple[int, str, str]:
    options = NEEDED | {"--" + name.replace("_", "-"): value for name, value in more.items()}
    run = CliRunner().invoke(app, ["plan", *(word for option in options.items() for word in option)])
    return run.exit_code, run.stdout, run.stderr


def test_it_says_speedup_and_pools() -> None:
    code, out, _ = plan(sessions="32", draft_batch="16")
    found = expect(Pair(13, 0.8, 1, 1.5, sessions=32, draft_batch=16), 8)
    assert code == 0
    assert f"With k = 8: {found.speedup:.2f} times plain decoding" in out
    assert f"Pools: {ratio(found.drafters)}." in out


def test_the_table_marks_the_chosen_k() -> None:
    _, out, _ = plan(num_speculative_tokens="5")
    marked = [line for line in out.splitlines() if line.startswith(">")]
    assert [line.split()[1] for line in marked] == ["5"]
    table, _, _ = out.partition("\n\n")
    assert len(table.splitlines()) == 1 + 8 + 1, "a head, the usual values of k, and the chosen one"


def test_it_says_what_a_million_tokens_costs() -> None:
    _, out, _ = plan(price_per_hour="3.6", sessions="4")
    found = expect(Pair(13, 0.8, 1, 1.5, sessions=4), 8)
    plain = 3.6 / 3600 * 1e6 / (4 * 1000 / 13)
    drafted = plain * (1 + found.drafters) / found.speedup
    assert f"A million tokens: {drafted:.2f} with drafts, {plain:.2f} without" in out
    assert "A million tokens" not in plan()[1]


def test_it_says_when_drafts_do_not_pay() -> None:
    _, out, _ = plan(acceptance="0.1", target_token_ms="5", sessions="2")
    assert "Drafts cost more than they gain here" in out
    assert "Drafts cost more" not in plan()[1]


def test_guesses_without_a_draft_model_take_hardly_any_drafters() -> None:
    looked_up = {**NEEDED, "--propose": "suffix"}
    del looked_up["--draft-token-ms"]
    run = CliRunner().invoke(app, ["plan", *(word for option in looked_up.items() for word in option)])
    found = expect(Pair(13, 0.8, 1, propose="suffix"), 8)
    assert run.exit_code == 0, run.stderr
    assert f"With k = 8: {found.speedup:.2f} times plain decoding" in run.stdout
    assert found.speedup > expect(Pair(13, 0.8, 1, 1.5), 8).speedup
    assert found.drafters < 0.1


def test_a_wrong_value_is_refused_by_its_flag() -> None:
    code, out, err = plan(acceptance="1.5")
    assert (code, out) == (2, "") and "--acceptance" in err
    code, out, err = plan(propose="suffix")
    assert (code, out) == (1, "")
    assert err.startswith("outrider plan: --draft-token-ms or --propose, but not both, must say")
    assert plan(num_speculative_tokens="257")[0] == 2


@pytest.mark.parametrize(
    ("drafters", "sentence"),
    [
        (0, "no drafters"),
        (0.3, "1 drafter for every 3 verifiers"),
        (0.51, "1 drafter for each verifier"),
        (1.0, "1 drafter for each verifier"),
        (1.01, "2 drafters for each verifier"),
        (6, "6 drafters for each verifier"),
    ],
)
def test_pools_are_counted_in_whole_workers(drafters: float, sentence: str) -> None:
    assert ratio(drafters) == sentence
