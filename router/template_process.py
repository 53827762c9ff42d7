"""A chat template in a process of its own: it is somebody else's program, and may loop or grow without end.

The process has so much memory, and so much of a processor for each rendering; beyond that it ends, and
another begins. It speaks JSON in lines, and ends with its parent.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import IO, Any

import jinja2

from outrider.errors import InvalidRequest
from router.chat_template import ChatTemplate

MEMORY_BYTES = 512 * 2**20  # of addresses
CPU_SECONDS = 2  # to compile a template, or to render it


class TemplateProcess:
    """Compiles a template and renders it. An empty one needs no process."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateError if it cannot be compiled within the limits."""
        self._made_of = {"source": source, "special_tokens": dict(special_tokens)}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._empty = ChatTemplate("", special_tokens) if not source else None
        if source and (error := self._begin()) is not None:
            raise jinja2.TemplateError(error)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Returns the prompt. Raises InvalidRequest if the template refuses the messages, is missing, or
        takes more than it may."""
        if self._empty is not None:
            return self._empty.render(messages, tools)
        with self._lock:
            error = self._begin() if self._process is None else None
            told = (
                None
                if error
                else self._ask({"messages": [dict(message) for message in messages], "tools": list(tools)})
            )
            if told is None:
                self._process = None
                error = error or "it takes too much time or memory"
                raise InvalidRequest(
                    f"messages are refused by the model's chat template: {error}", field="messages"
                )
        if "refused" in told:
            raise InvalidRequest(told["refused"], field="messages")
        return str(told["text"])

    def _begin(self) -> str | None:
        """Returns why there is no process, or None if there is one."""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "router.template_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # a signal to the router's group is not meant for it
        )
        self._end = weakref.finalize(self, _end, self._process)
        told = self._ask(self._made_of)
        if told is None:
            return "it takes too much time or memory"
        return told.get("refused")

    def _ask(self, what: object) -> dict[str, str] | None:
        """Returns the answer; None if the process has ended."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(what) + "\n")
            process.stdin.flush()
            answer: dict[str, str] = json.loads(process.stdout.readline())
            return answer
        except (OSError, ValueError):  # an unfinished line is no JSON
            self._end()
            return None


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


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
            if template is None:
                template = ChatTemplate(**json.loads(line))
            else:
                answer["text"] = template.render(**json.loads(line))
        except InvalidRequest as error:
            answer["refused"] = error.message
        except Exception as error:
            answer["refused"] = f"{type(error).__name__}: {error}"[:500]
        print(json.dumps(answer), file=told, flush=True)


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)
