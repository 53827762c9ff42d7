from __future__ import annotations

import re

import pytest

from demo.training.corpus import training_documents
from outrider.errors import InvalidRequest
from outrider_cli.bench.workloads import (
    HELD_OUT,
    PROMPT_CHARACTERS,
    WORKLOADS,
    blocks,
    docstrings,
    heldout_text,
    paragraphs,
    prompts,
)


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_prompts_are_many_different_and_the_same_in_every_run(workload: str) -> None:
    found = prompts(workload, 100)
    assert len(set(found)) == 100
    assert prompts(workload, 100) == found
    assert all(prompt == prompt.rstrip() and len(prompt) >= 150 for prompt in found)


def test_code_is_held_out_and_begins_with_a_block_of_each_module() -> None:
    found = prompts("code", 300)
    for name, prompt in zip(HELD_OUT, found, strict=False):
        assert heldout_text(name).lstrip().startswith(prompt)
    trained_on = "\n".join(training_documents())
    assert not [prompt for prompt in found[:50] if prompt in trained_on]


def test_prose_is_sentences() -> None:
    for prompt in prompts("prose", 100):
        assert PROMPT_CHARACTERS <= len(prompt) <= 3 * PROMPT_CHARACTERS
        assert re.search(r"[a-z]+ (the|a|of|is|to) [a-z]+", prompt)
        assert ">>>" not in prompt


def test_too_many_prompts_are_refused_with_what_to_change() -> None:
    with pytest.raises(InvalidRequest, match=r"the workload code has \d+ prompts .* lower --streams"):
        prompts("code", 10**6)
    with pytest.raises(InvalidRequest, match="--workload poems is not one of code, prose, random"):
        prompts("poems", 1)


def test_blocks_are_whole_lines_and_the_rest_is_dropped() -> None:
    assert list(blocks(["ab", "cd", "", "ef", "gh", "i"], 4)) == ["ab\ncd", "\nef\ngh".strip("\n")]
    assert list(blocks(["abcdef", "a"], 4)) == ["abcdef"]


def test_only_sentences_of_docstrings_are_prose() -> None:
    source = '''
def f():
    """Short.

    This paragraph is long enough to be taken, and it
    goes over two lines of the source.

    >>> f(1, 2, 3) == [4, 5, 6] or {7: 8}  # no sentence at all, but code

    This one does not end as sentences do, although it is long enough to be one
    """
'''
    [doc] = docstrings(source)
    taken = "This paragraph is long enough to be taken, and it goes over two lines of the source."
    assert list(paragraphs(doc)) == [taken]
    assert list(docstrings("def broken(")) == []
