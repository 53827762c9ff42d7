"""A chat template in a process of its own: it is somebody else's program, and may loop or grow without end.

The process has so much memory, and so much of a processor for each rendering; beyond that it ends, and
another begins.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Mapping
from typing import IO, Any

import jinja2

from outrider.errors import InvalidRequest
from router.chat_template import ChatTemplate
from router.line_process import LineProcess
from router.rendering import Conversation

MEMORY_BYTES = 512 * 2**20  # of addresses
CPU_SECONDS = 2  # to compile a template, or to render it
SMALL_BYTES = 256 * 1024  # of what is to be rendered, as JSON: a body of 64 KiB may come to nearly as much
TOO_MUCH = {"refused": "it takes too much time or memory"}


class TemplateProcess:
    """Compiles a template and renders it. An empty one needs no process. Large conversations have another
    process, so that small ones do not wait for them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateError if it cannot be compiled within the limits, Unavailable as `render`."""
        made_of = {"source": source, "special_tokens": dict(special_tokens)}
        self._process, self._large = (LineProcess("router.template_process", made_of) for _ in range(2))
        self._empty = ChatTemplate("", special_tokens) if not source else None
        begun = self._process.begin() if source else {}
        if begun is None or "refused" in begun:
            raise jinja2.TemplateError((begun or TOO_MUCH)["refused"])

    def render(self, conversation: Conversation) -> str:
        """Returns the prompt. Raises InvalidRequest if the template refuses the messages, is missing, or
        takes more than it may; Unavailable if somebody ends its process again and again."""
        if self._empty is not None:
            return self._empty.render(conversation)
        line = json.dumps(conversation.to_json())
        told = (self._process if len(line) <= SMALL_BYTES else self._large).ask(line)
        if told is None:
            raise InvalidRequest(
                f"messages are refused by the model's chat template: {TOO_MUCH['refused']}", field="messages"
            )
        if "refused" in told:
            raise InvalidRequest(told["refused"], field=told.get("field", "messages"))
        return str(told["text"])


def main(asked: IO[str], told: IO[str]) -> None:
    """Answers each line with one."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: ChatTemplate | None = None
    for line in asked:
        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        resource.setrlimit(resource.RLIMIT_CPU, (int(used) + CPU_SECONDS, resource.RLIM_INFINITY))
        answer: dict[str, Any] = {}
        try:
            asked_for = json.loads(line)
            if template is None:
                template = ChatTemplate(**asked_for)
            else:
                answer["text"] = template.render(Conversation.from_json(asked_for))
        except InvalidRequest as error:
            answer |= {"refused": error.message, "field": error.field}
        except Exception as error:
            answer["refused"] = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps(answer), file=told, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
