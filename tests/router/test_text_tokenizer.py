from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.errors import InvalidRequest, OutriderError, PeerRefused
from router import tokenizer as tokenizer_module
from router.chat_template import ChatTemplate
from router.rendering import Conversation
from router.requests import TokenizerFiles
from router.tokenizer import HUGE, MOST_TOKEN_BYTES, PIECE, load
from router.tokenizer import Tokenizer as Tokenized
from tests.router.api import scripted

BYTE_LEVEL = scripted.byte_level()
CHAT = [
    {"role": "system", "content": "be <brief> & kind"},
    {"role": "user", "content": "  héllo\n{{ 1 }} "},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "more"},
]
CONTROLS = """
{%- for message in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {% if tools %}TOOLS{% endif %}
    {{ message | tojson }}
    {% generation %}{{ message.content | trim }}{% endgeneration %}
{% endfor %}
{{ bos_token }}{{ messages | tojson(indent=2) }}{% if add_generation_prompt %}>{% endif %}
"""


@pytest.mark.parametrize("template", [scripted.TEMPLATE, CONTROLS], ids=["simple", "controls"])
def test_renders_as_transformers_does(template: str) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=BYTE_LEVEL, bos_token=scripted.BOS, eos_token=scripted.EOS, chat_template=template
    )
    ours = ChatTemplate(template, reference.special_tokens_map)
    expected = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.render(Conversation(CHAT)) == expected
    expected_ids = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert load(scripted.files(BYTE_LEVEL, template)).encode_rendered(expected) == tuple(expected_ids)


async def test_a_long_prompt_does_not_hold_up_the_event_loop() -> None:
    tokenizer = load(scripted.files(BYTE_LEVEL, scripted.TEMPLATE))
    text = "".join(f"{number} = f({number * 7 % 1000})\n" for number in range(40_000))
    for encode in (tokenizer.encode, tokenizer.encode_rendered):
        encoding = asyncio.create_task(asyncio.to_thread(encode, text))
        turns = 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert len(await encoding) > 100_000
        assert turns > 20  # a few, where the thread keeps the interpreter to itself


def test_strftime_now_uses_the_clock_given() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {})
    assert template.render(Conversation(CHAT), now=lambda: datetime(2026, 2, 3)) == "03 Feb 2026"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.at_all }}", "chat template"),
        ("{{ messages.append(1) }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}{{ messages + 1 }}", "chat template"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "chat template: maximum recursion"),
        ("{% for _ in range(10 ** 9) %}{% endfor %}", "chat template: Range too big"),
    ],
)
def test_a_template_that_cannot_be_rendered_refuses_the_messages(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        ChatTemplate(template, {}).render(Conversation(CHAT))
    assert refused.value.field == "messages"


def test_a_text_gets_the_special_tokens_of_the_post_processor_and_a_chat_only_its_own() -> None:
    tokenizer = load(scripted.files(BYTE_LEVEL))
    bos = BYTE_LEVEL.token_to_id(scripted.BOS)
    assert tokenizer.encode("fox")[0] == bos
    assert (
        tokenizer.encode_rendered(tokenizer.render(Conversation([{"role": "user", "content": "fox"}]))).count(
            bos
        )
        == 1
    )
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


@pytest.mark.parametrize("split", [False, True])
def test_special_tokens_in_a_text_are_control_tokens_as_they_are_to_transformers(split: bool) -> None:
    reference = PreTrainedTokenizerFast(
        tokenizer_object=BYTE_LEVEL, bos_token=scripted.BOS, eos_token=scripted.EOS
    )
    text = f"the fox{scripted.EOS}there"
    expected = reference.encode(text, add_special_tokens=False, split_special_tokens=split)
    ours = load(scripted.files(BYTE_LEVEL, "")).encode_rendered(text)
    assert (ours == tuple(expected)) is not split  # its default


class Recorded:
    """A tokenizer that notes what it is asked, and how much at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.lengths = list[int]()
        self.busy = self.most_busy = 0

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.lengths += map(len, texts)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        time.sleep(0.01)
        found = self._tokenizer.encode_batch_fast(
            [text[:10] for text in texts] if len(texts[0]) > HUGE else texts,
            add_special_tokens=add_special_tokens,
        )
        self.busy -= 1
        return found


def test_a_text_with_too_many_tokens_is_known_by_few_pieces_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(scripted.files(BYTE_LEVEL, ""))
    recorded = Recorded(BYTE_LEVEL)
    monkeypatch.setattr(tokenizer, "_tokenizer", recorded)
    assert tokenizer.exceeds("the fox" * PIECE, 10_000)
    assert recorded.lengths == [PIECE] * len(recorded.lengths) and len(recorded.lengths) <= 4
    whole = len(tokenizer.encode_rendered("the fox there, " * 5000))
    assert not tokenizer.exceeds("the fox there, " * 5000, whole)
    assert tokenizer.exceeds("the fox there, " * 5000, whole * 9 // 10)


async def test_huge_texts_are_tokenized_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(scripted.files(BYTE_LEVEL, ""))
    recorded = Recorded(BYTE_LEVEL)
    monkeypatch.setattr(tokenizer, "_tokenizer", recorded)
    for length, most in ((HUGE + 1, 1), (100, 2)):
        texts = ["x" * length] * 2
        await asyncio.gather(*(asyncio.to_thread(tokenizer.encode, text) for text in texts))
        assert recorded.most_busy == most


def test_truncation_and_padding_in_the_file_do_not_touch_a_prompt() -> None:
    limited = Tokenizer.from_str(BYTE_LEVEL.to_str())
    limited.enable_truncation(2)
    limited.enable_padding(length=50)
    assert load(scripted.files(limited)).encode("the quick brown fox") == tuple(
        BYTE_LEVEL.encode("the quick brown fox").ids
    )


def test_built_once_for_the_same_files_and_anew_for_another_template() -> None:
    files = scripted.files(BYTE_LEVEL)
    assert load(files) is load(replace(files))
    assert load(files) is not load(replace(files, chat_template="{{ 1 }}"))


def test_special_tokens_are_looked_through_once_whatever_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vocabulary like Gemma's, with six thousand, each answer took the event loop 4 ms: half a second
    for the 128 answers that a request may have."""
    looked: list[Sequence[str]] = []

    def look(_tokenizer: Tokenizer, markers: Sequence[str] = ()) -> frozenset[int]:
        looked.append(markers)
        return frozenset({1})

    monkeypatch.setattr(tokenizer_module, "hidden_ids", look)
    tokenizer = Tokenized(scripted.files(BYTE_LEVEL, scripted.TEMPLATE))
    for _ in range(128):
        tokenizer.detokenizer()
        tokenizer.detokenizer(special=True)
        tokenizer.detokenizer(("<think>",))
    assert looked == [(), ("<think>",)]


@pytest.mark.parametrize("broken", ["", "{}", "not json"])
def test_a_tokenizer_that_cannot_be_read_is_refused(broken: str) -> None:
    files = replace(scripted.files(BYTE_LEVEL), json=broken)
    with pytest.raises(PeerRefused, match="tokenizer cannot be read"):
        load(files)


def with_part(name: str, part: Any) -> TokenizerFiles:
    files = scripted.files(BYTE_LEVEL)
    return replace(files, json=json.dumps(json.loads(files.json) | {name: part}))


def test_a_tokenizer_that_makes_much_of_little_is_refused() -> None:
    """Else a prompt of one byte is millions of tokens, for which a router has no memory."""
    doubles = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

    def sequence(kind: str, *parts: Any) -> dict[str, Any]:
        return {"type": "Sequence", kind: list(parts)}

    several = sequence("normalizers", *[doubles] * 3)
    both = "normalizer and pre-tokenizer"
    of = {"normalizer": both, "pre_tokenizer": both, "decoder": "decoder"}
    for name, part in (
        ("normalizer", sequence("normalizers", *[doubles] * 7)),
        ("normalizer", sequence("normalizers", *[several] * 3)),
        ("normalizer", doubles | {"content": "a" * 65}),
        ("normalizer", doubles | {"pattern": {"Regex": ".?"}, "content": "a" * 65}),
        ("pre_tokenizer", sequence("pretokenizers", *[bytes_of] * 7)),
        ("decoder", sequence("decoders", *[doubles] * 7)),
    ):
        with pytest.raises(PeerRefused, match=f"the tokenizer's {of[name]} may make more than 64 bytes"):
            load(with_part(name, part))
    one_after_the_other = with_part("pre_tokenizer", sequence("pretokenizers", *[bytes_of] * 4))
    parts = json.loads(one_after_the_other.json) | {"normalizer": sequence("normalizers", *[doubles] * 3)}
    with pytest.raises(PeerRefused, match=both):
        load(replace(one_after_the_other, json=json.dumps(parts)))
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "\u2581"}
    load(with_part("normalizer", sequence("normalizers", {"type": "NFKC"}, spaces, several)))


def test_a_decoder_is_not_to_take_any_time(caplog: pytest.LogCaptureFixture) -> None:
    """Of 20 tokens of 400 characters each one had taken 53 seconds, on the event loop."""
    slow = {"type": "Replace", "pattern": {"Regex": "(a+)+b"}, "content": "c"}
    fuse = {"type": "Fuse"}
    for part in (slow, {"type": "Sequence", "decoders": [fuse, slow]}):
        with pytest.raises(PeerRefused, match="the tokenizer's decoder has a regular expression"):
            load(with_part("decoder", part))
    (said,) = [record.getMessage() for record in caplog.records]
    assert "can give token ids alone: the tokenizer's decoder has" in said
    plain = slow | {"pattern": {"String": "Regex"}}
    load(with_part("decoder", {"type": "Sequence", "decoders": [fuse, plain]}))


@pytest.mark.parametrize(("size", "sound"), [(MOST_TOKEN_BYTES, True), (MOST_TOKEN_BYTES + 1, False)])
def test_a_token_has_at_most_so_many_bytes(size: int, sound: bool) -> None:
    """30 of 8 MB each had taken 4.9 GB of a router."""
    token = {"id": 10**6, "content": "a" * size, "special": False, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    added = json.loads(scripted.files(BYTE_LEVEL).json)["added_tokens"]
    with nullcontext() if sound else pytest.raises(PeerRefused, match=f"a token of {size} bytes"):
        load(with_part("added_tokens", [*added, token]))


def test_where_the_library_panics_there_is_an_error_of_ours() -> None:
    """By gRPC nothing was answered at all."""
    files = with_part(
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False},
    )
    with pytest.raises(OutriderError, match="the model's tokenizer failed at this text"):
        load(files).encode("a" * 28 + "c")


def test_a_template_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(PeerRefused, match="chat template cannot be compiled"):
        load(scripted.files(BYTE_LEVEL, "{% for %}"))
