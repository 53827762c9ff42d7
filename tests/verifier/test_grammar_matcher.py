"""Grammars, and tokens that the tokenizer or the model lacks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from outrider.engine.tokenizer import load_tokenizer
from outrider.errors import InvalidRequest
from outrider.grammar import Grammars
from outrider.grammar_matcher import BY_ID, Matcher
from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster
from tests.tiny_models import build, save_tokenizer

ROWS = 300  # of the model
PROMPT = [5, 9, 30, 31, 7]
WARM = SamplingParams(temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has one token more than the model has rows, as some have in practice."""
    folder = build("llama", tmp_path_factory.mktemp("lacking") / "target", vocab_size=ROWS)
    save_tokenizer(folder, ROWS - 1)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    while tokenizer.get_vocab_size() <= ROWS:
        tokenizer.add_special_tokens([f"<extra{tokenizer.get_vocab_size()}>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(target: Path) -> LLTokenizer:
    return LLTokenizer(load_tokenizer(str(target)).json, eos_token=[0])


def tokens(mask: np.ndarray | None) -> list[int]:
    assert mask is not None
    return np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()


def test_a_token_that_the_model_lacks_is_never_forced_nor_allowed(tokenizer: LLTokenizer) -> None:
    grammar = f'start: "ab" <extra{ROWS}>'
    whole, lacking = Matcher(tokenizer, grammar, None), Matcher(tokenizer, grammar, ROWS)
    assert whole.forced()[-1] == ROWS not in lacking.forced()
    either = Matcher(tokenizer, f'start: "a" | <extra{ROWS}> | <extra{ROWS - 1}>', ROWS)
    assert ROWS - 1 in tokens(either.mask()) and ROWS not in tokens(either.mask())
    assert lacking.follow(lacking.forced()) is None
    assert lacking.mask() is None and lacking.fault() == "no text can obey it"
    assert whole.follow(whole.forced()) is None and tokens(whole.mask()) == [0]


def test_a_grammar_that_nothing_can_obey_without_it_is_refused(target: Path) -> None:
    grammars = Grammars(load_tokenizer(str(target)).json, [0], ROWS)
    grammars.check(f"start: <extra{ROWS - 1}>")
    with pytest.raises(InvalidRequest, match="no text can obey it"):
        grammars.check(f"start: <extra{ROWS}>")


def test_a_token_that_the_tokenizer_lacks_is_a_guess_that_does_not_fit(tokenizer: LLTokenizer) -> None:
    """A model may have more rows. The library never comes back from such a token."""
    matcher = Matcher(tokenizer, "start: /[a-z]+/", ROWS + 100)
    right = tokens(matcher.mask())[:1]
    for unknown in (ROWS + 1, ROWS + 99, 2**32 - 1):
        assert matcher.fitting([*right, unknown]) == 1 == matcher.take([*right, unknown])
        matcher.back(1)
    assert not matcher.is_error() and tokens(matcher.mask())


def test_where_an_ordinary_token_is_named_by_its_id_nothing_is_tried_ahead(tokenizer: LLTokenizer) -> None:
    """The library would go back to a wrong place."""
    for named in ("5", "5,6", "5-9", "^5", "*"):
        matcher = Matcher(tokenizer, f'start: "x" <[{named}]> "y"', ROWS)
        assert not matcher.goes_back and matcher.take(matcher.forced()) == 0 == matcher.fitting([1])
    assert Matcher(tokenizer, f'start: "x" <[{ROWS}]> <extra{ROWS - 1}> "y"', None).goes_back
    assert Matcher(tokenizer, "start: /[0-9<]+/", ROWS).goes_back
    escaped = json.dumps({"grammars": [{"lark_grammar": 'start: "x" <[5]> "y"'}]}).replace("<", "\\u003c")
    assert not Matcher(tokenizer, escaped, ROWS).goes_back
    assert not Matcher(tokenizer, f"start: <[{'9' * 5000}]>", ROWS).goes_back


def test_ids_are_looked_for_in_one_pass() -> None:
    """Each beginning of one had been followed to the end of a text that is full of them, for two seconds."""
    assert BY_ID.findall("<[<[<[5]> <[ <[6]>") == ["5", "6"]


@pytest.mark.parametrize("grammar", ['"x" <[50]> <[60]> "y"', '<[50]> "f" /[0-9]{9}/ <[60]>'])
async def test_a_text_is_the_same_with_guesses_and_without(target: Path, grammar: str) -> None:
    async with Cluster(target) as cluster:
        await cluster.add_drafter(target)
        plain, drafted = [
            await cluster.ask(PROMPT, WARM, 40, k=k, grammar=f"start: {grammar}") for k in (0, None)
        ]
        assert plain.tokens == drafted.tokens and 60 in plain.tokens


async def test_what_stands_beside_a_token_that_nobody_can_draw_goes_on(target: Path) -> None:
    """The verifier's own guess of it had made the step fail, and so all in it."""
    async with Cluster(target) as cluster:
        alone = await cluster.ask(PROMPT, WARM, 60, ignore_eos=True)

        async def ask_beside(told: list[int]) -> None:
            if len(told) < 20:
                with pytest.raises(InvalidRequest, match="no text can obey it"):
                    await cluster.ask(PROMPT, WARM, 20, grammar=f'start: "ab" <extra{ROWS}> "cd"')

        beside = await cluster.ask(PROMPT, WARM, 60, ignore_eos=True, on_tokens=ask_beside)
        assert beside.tokens == alone.tokens
