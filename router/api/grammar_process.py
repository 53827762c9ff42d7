"""Grammars are compiled in a process of its own: the library's limits do not bound all that one may take. A
few patterns, all of which a text is to obey, keep it busy for minutes, and grow to gigabytes.

The process forks for each: the copy has so much of a processor and of memory, and is lost where that is not
enough. What has passed here costs no more at the workers.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from outrider.errors import InvalidRequest
from outrider.grammar import STACK_BYTES, Grammars
from router.api.grammar_text import compiled_here
from router.line_process import FROM_OUTSIDE, LineProcess

CPU_SECONDS = 0.5  # of one grammar, with the search for the part at fault
MEMORY_BYTES = 512 * 2**20  # of addresses that it takes beside what stands before it, and its thread's stack
KEPT = 64  # answers
TOO_MUCH = {"refused": "it takes too much time or memory to compile"}

Compile = Callable[[Any, Grammars], str]
"""From what was asked to the text of a grammar. Raises InvalidRequest that names the field at fault."""


class GrammarProcess:
    """A process that compiles grammars for one tokenizer."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        told = [tokenizer_json, eos_token_ids, vocab_size]
        self._process = LineProcess("router.api.grammar_process", told)
        self._answered = lru_cache(maxsize=KEPT)(self._answer)

    def compiled(self, asked: object, owner: str) -> dict[str, str]:
        """Returns the grammar's `text`, or why it is `refused`, and at which `field` that is known. Kept is
        what one `owner` of keys has asked for: how long it takes tells nobody what others have. Raises
        Unavailable if somebody ends its process, again and again: that says nothing of the grammar."""
        return self._answered(json.dumps(asked), owner)

    def _answer(self, asked: str, owner: str) -> dict[str, str]:
        return self._process.ask(asked) or TOO_MUCH


@lru_cache(maxsize=8)
def process_of(tokenizer_json: str, eos_token_ids: tuple[int, ...], vocab_size: int) -> GrammarProcess:
    """Returns the one of a tokenizer and a model's vocabulary; it begins with the first grammar."""
    return GrammarProcess(tokenizer_json, eos_token_ids, vocab_size)


def main(asked: IO[str], told: IO[str], compile_: Compile) -> None:
    """Answers each line with one."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    grammars = Grammars(*json.loads(asked.readline()))
    grammars.prepare()
    print("{}", file=told, flush=True)
    while line := asked.readline():
        copy = os.fork()
        if not copy:
            _answer(json.loads(line), grammars, told, compile_)
            os._exit(0)
        _, ended = os.waitpid(copy, 0)
        if os.WIFSIGNALED(ended) and os.WTERMSIG(ended) in FROM_OUTSIDE:
            os.kill(os.getpid(), signal.SIGKILL)  # who asks is to know that no limit has ended it
        if ended:
            print(json.dumps(TOO_MUCH), file=told, flush=True)


def _answer(asked: Any, grammars: Grammars, told: IO[str], compile_: Compile) -> None:
    with suppress(OSError):  # where the system does not tell, the processor's time is the limit
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + STACK_BYTES * 2 + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # ends it
    try:
        answer = {"text": compile_(asked, grammars)}
    except InvalidRequest as error:
        answer = {"refused": error.message, **({"field": error.field} if error.field else {})}
    signal.setitimer(signal.ITIMER_PROF, 0)
    told.write(json.dumps(answer) + "\n")
    told.flush()


if __name__ == "__main__":
    main(sys.stdin, sys.stdout, compiled_here)
