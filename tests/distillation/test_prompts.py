"""A question that a chat model makes up is asked as its template asks a user's."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from distillation.prompts import prompt_of, template_of
from tests.tiny_models import save_tokenizer

CHAT = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>|{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("written", ["why?<eos>", " why?", "why?<eos>|[assistant]because"])
def test_a_question_ends_where_the_template_ends_it(written: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = CHAT
    template = template_of(tokenizer, "m")
    assert tokenizer.decode(template.before) == "[user]"
    prompt = prompt_of(tokenizer, template, tokenizer(written)["input_ids"])
    assert prompt is not None
    assert tokenizer.decode(prompt.ids) == "[user]why?<eos>|[assistant]"
    assert prompt_of(tokenizer, template, tokenizer(" <eos>")["input_ids"]) is None
