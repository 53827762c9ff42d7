"""What is reasoning in a text, and what the answer: the same however the text comes."""

from __future__ import annotations

import itertools
import random

import pytest

from outrider.options.sessions import REASONING_PARSERS
from router.reasoning import (
    DEEPSEEK_R1,
    FORMATS,
    GRANITE,
    MISTRAL,
    NONE,
    OF_TEMPLATE,
    QWEN3,
    SEED_OSS,
    ReasoningFormat,
    Splitter,
    named,
    of_template,
)


def split(form: ReasoningFormat, begun: bool, text: str, cuts: list[int]) -> tuple[str, str]:
    splitter = Splitter(form, begun)
    ends = [0, *cuts, len(text)]
    told = [splitter.push(text[start:end]) for start, end in itertools.pairwise(ends)] + [splitter.flush()]
    return "".join(one[0] for one in told), "".join(one[1] for one in told)


@pytest.mark.parametrize(
    ("form", "begun", "text", "expected"),
    [
        (QWEN3, False, "<think>\nA < B </thin\n</think>\n\nParis\n\n", ("A < B </thin", "Paris\n\n")),
        (QWEN3, False, "\n<think>\n\n</think>\n\n\nParis", ("", "\nParis")),
        (QWEN3, False, "Paris <think>no</think>", ("", "Paris <think>no</think>")),
        (QWEN3, False, "<thi", ("", "<thi")),
        (QWEN3, False, "<think>cut off </th", ("cut off </th", "")),
        (QWEN3, False, " " * 100 + "<think>late", ("", " " * 100 + "<think>late")),
        (QWEN3, True, "hm\n\nhm\n</think>\n\nParis", ("hm\n\nhm", "Paris")),
        (QWEN3, True, "hm" + "\n" * 200 + "</think>x", ("hm" + "\n" * 136, "x")),
        (QWEN3, True, "", ("", "")),
        (DEEPSEEK_R1, True, "<think>\nhm</think>Paris", ("hm", "Paris")),
        (GRANITE, False, "Here is my thought process: hm\nHere is my response: Paris", (" hm", " Paris")),
        (MISTRAL, False, "[THINK]hm[/THINK]Paris", ("hm", "Paris")),
        (SEED_OSS, False, "<seed:think>hm</seed:think>Paris", ("hm", "Paris")),
    ],
)
def test_a_text_is_split_the_same_however_it_comes(
    form: ReasoningFormat, begun: bool, text: str, expected: tuple[str, str]
) -> None:
    drawn = random.Random(4)
    for count in (0, 1, 2, 5, 20, len(text)):
        cuts = sorted(drawn.sample(range(len(text) + 1), min(count, len(text) + 1)))
        assert split(form, begun, text, cuts) == expected, cuts


def test_a_format_is_that_of_the_chat_template_unless_it_is_named() -> None:
    assert (OF_TEMPLATE, NONE, *FORMATS) == REASONING_PARSERS
    assert of_template("{% if '</think>' in content %}") is QWEN3
    assert of_template("write it after 'Here is my response:'") is GRANITE
    assert of_template("{{ '[THINK]' + t + '[/THINK]' }}") is MISTRAL
    assert of_template("{{ messages }}") is None
    assert named(OF_TEMPLATE, "</think>") is QWEN3 and named("deepseek_r1", "</think>") is DEEPSEEK_R1
    assert named("none", "</think>") is None


def test_a_prompt_may_begin_the_reasoning_itself() -> None:
    assert QWEN3.begun_by("assistant\n<think>\n") and not QWEN3.begun_by("<think>\n\n</think>\n\n")
    assert not QWEN3.begun_by("what does <think> mean?\nassistant\n")
    assert DEEPSEEK_R1.begun_by("assistant") and not DEEPSEEK_R1.begun_by("assistant</think>")
    assert QWEN3.open_in("<think>hm") and not QWEN3.open_in("<think>hm</think>P") and not QWEN3.open_in("P")
