from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from outrider.errors import InvalidRequest, PeerRefused
from router.chat_template import ChatTemplate
from router.tokenizer import load
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
    assert ours.render(CHAT) == expected
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
    assert template.render(CHAT, now=lambda: datetime(2026, 2, 3)) == "03 Feb 2026"


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
        ChatTemplate(template, {}).render(CHAT)
    assert refused.value.field == "messages"


def test_a_text_gets_the_special_tokens_of_the_post_processor_and_a_chat_only_its_own() -> None:
    tokenizer = load(scripted.files(BYTE_LEVEL))
    bos = BYTE_LEVEL.token_to_id(scripted.BOS)
    assert tokenizer.encode("fox")[0] == bos
    assert tokenizer.encode_rendered(tokenizer.render([{"role": "user", "content": "fox"}])).count(bos) == 1
    assert tokenizer.decode(tokenizer.encode("the fox")) == "the fox"


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


@pytest.mark.parametrize("broken", ["", "{}", "not json"])
def test_a_tokenizer_that_cannot_be_read_is_refused(broken: str) -> None:
    files = replace(scripted.files(BYTE_LEVEL), json=broken)
    with pytest.raises(PeerRefused, match="tokenizer cannot be read"):
        load(files)


def test_a_template_that_cannot_be_compiled_is_refused() -> None:
    with pytest.raises(PeerRefused, match="chat template cannot be compiled"):
        load(scripted.files(BYTE_LEVEL, "{% for %}"))
