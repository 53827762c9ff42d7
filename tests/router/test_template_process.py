"""A chat template that takes too much is ended, and the next request is rendered as ever."""

from __future__ import annotations

import gc
import threading

import jinja2
import pytest

from outrider.errors import InvalidRequest
from router.rendering import Conversation
from router.template_process import SMALL_BYTES, TemplateProcess

HELLO = [{"role": "user", "content": "hello"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set ns = namespace(x='aaaa') %}{% for _ in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
REPLACES = "{% set x = 'ab' * 99999 %}{{ x.replace('b', x).replace('b', x) | length }}"


@pytest.mark.parametrize("attack", [LOOPS, GROWS, REPLACES], ids=["loops", "grows", "replaces"])
def test_a_rendering_has_so_much_time_and_memory(attack: str) -> None:
    template = TemplateProcess(
        "{% if messages[0].content == 'attack' %}" + attack + "{% endif %}{{ messages[0].content }}", {}
    )
    assert template.render(Conversation(HELLO)) == "hello"
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="refused by the model's chat template"):
            template.render(Conversation([{"role": "user", "content": "attack"}]))
        assert template.render(Conversation(HELLO)) == "hello"


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 10 }}", "{{ 10 ** (10 ** 10) }}"])
def test_what_is_computed_while_it_is_compiled_counts_too(source: str) -> None:
    try:
        template = TemplateProcess(source, {})
    except jinja2.TemplateError:
        return
    with pytest.raises(InvalidRequest):
        template.render(Conversation(HELLO))


PARTS = (
    "{% for m in messages %}{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("source", [PARTS, "{{ messages[0].content }}", "{{ messages[0].content | tojson }}"])
def test_a_text_reaches_a_template_that_wants_parts(source: str) -> None:
    rendered = TemplateProcess(source, {}).render(Conversation(HELLO))
    assert rendered.strip('"') == "hello"


def test_one_that_cannot_be_compiled_says_why() -> None:
    with pytest.raises(jinja2.TemplateError, match="unexpected"):
        TemplateProcess("{{ } }}", {})


def test_a_small_conversation_does_not_wait_for_a_large_one() -> None:
    template = TemplateProcess("{% if messages[0].content | length > 99 %}" + LOOPS + "{% endif %}small", {})
    refused = threading.Event()

    def render() -> None:
        with pytest.raises(InvalidRequest):
            template.render(Conversation([{"role": "user", "content": "x" * SMALL_BYTES}]))
        refused.set()

    large = threading.Thread(target=render)
    large.start()
    while not template._large._lock.locked():
        assert not refused.is_set()
    assert template.render(Conversation(HELLO)) == "small" and not refused.is_set()
    large.join()
    assert refused.is_set()


def test_who_ends_its_process_ends_no_request() -> None:
    template = TemplateProcess("{{ messages[0].content }}", {})
    for _ in range(2):
        process = template._process._process
        assert process is not None
        process.kill()
        process.wait()
        assert template.render(Conversation(HELLO)) == "hello"


def test_its_process_ends_with_it() -> None:
    template = TemplateProcess("{{ messages[0].content }}", {"bos_token": "\u2028ü"})
    process = template._process._process
    assert process is not None and process.poll() is None
    del template
    gc.collect()
    assert process.poll() is not None
