"""Grammars that texts obey: what may come next at a place in one. No torch.

llguidance does it. What a grammar costs is bounded: in bytes, in what its parser may do for one token, and in
that all of it is done on threads of this file's own, beside event loops and engines. What a step waits for is
done on others than what only its own session waits for: nothing costly stands before it in their queue, and
those others give way.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from functools import lru_cache

from llguidance import LLTokenizer

from outrider.errors import InvalidRequest
from outrider.grammar_company import COSTLY_SECONDS, Company
from outrider.grammar_matcher import Mask, Matcher

log = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 32 * 1024
WHITE_SPACE = r"[ \t]{1,2}|\r?\n[ \t]{0,40}"  # at one place of JSON: a model may write it without end
STACK_BYTES = 256 * 2**20  # of addresses: rules that name one another in a chain nest as deep in the library
NICENESS = 15  # of what only one session waits for: a thirtieth of what a step's thread has beside it

Allowed = Callable[[], Mask | None]
"""Waits for a mask; None = not known, and the row is not needed."""
Choose = Callable[[int | None, Mask], int | None]
"""Which of the tokens that may come is likely to, behind a token; None = the text's last, and none is."""


class Place:
    """How far one text has come in its grammar. All calls are one thread's.

    A step may ask for the masks of several paths. Their work shares the matcher, one after the other."""

    def __init__(
        self,
        start: Callable[[], Matcher],
        output: Sequence[int],
        changed: Callable[[], object],
        company: Company,
        ends: Container[int] = (),
    ) -> None:
        """`changed` is called, on some thread, when `ready` has become true. `ends`: tokens that end a
        text."""
        self.fault: str | None = None  # why the text cannot go on
        self.known: Sequence[bool] = ()  # of each row of the last `masks`, whether it has one
        self._changed = changed
        self._behind = list(output)  # tokens that the matcher has not been told
        self._matcher: Matcher | None = None
        self._using = threading.Lock()  # the matcher, which bears one thread at a time
        self._start = start
        self._next: Mask | None = None  # where it was found before it was asked for
        self._costly = False
        self._company = company
        self._ends = ends
        self._forced: Sequence[int] = ()  # tokens that the grammar leaves no choice of, as it was found once
        self._forced_from = 0  # of them, those from there on come next
        self._find_next()

    @property
    def ready(self) -> bool:
        """Returns False while the grammar is compiled, or so costly a mask found that a step had to wait."""
        return self._work.done()

    def follow(self, tokens: Sequence[int]) -> None:
        """The text has gone on by these tokens."""
        self._behind += tokens
        self._next = None
        begin, end = self._forced_from, self._forced_from + len(tokens)
        if list(tokens) == list(self._forced[begin:end]):
            self._forced_from = end
        else:
            self._forced, self._forced_from = (), 0
        if self._costly:
            self._find_next()

    def fits(self, path: Sequence[int]) -> int | None:
        """Returns how many of the tokens may follow, one after the other; None = it is not known now."""
        if self.fault is not None or self._costly or not self._using.acquire(blocking=False):
            return None
        try:
            if not self._caught_up():
                return None
            assert self._matcher is not None
            return self._matcher.fitting(path)
        finally:
            self._using.release()

    def forced(self, most: int) -> list[int]:
        """Returns the next tokens of which the grammar leaves no choice, at most so many, as the tokenizer
        cuts their text. The model may cut it otherwise. None are looked for where that has cost too much."""
        if self.fault is not None or self._costly:
            return []
        if self._forced_from == len(self._forced):
            self._find_forced()
        return list(self._forced[self._forced_from :][:most])

    def likely(self, most: int, choose: Choose) -> list[tuple[int, bool]]:
        """Returns the next tokens, at most so many, as far as the grammar leaves no choice of them or
        `choose` knows one; and of each whether it was chosen. Where that has cost too much none are."""
        found = [(token, False) for token in self.forced(most)]
        may = self.fault is None and not self._costly and self._company.may_choose
        if len(found) >= most or not may or not self._using.acquire(blocking=False):
            return found
        try:
            if self._caught_up():
                assert self._matcher is not None
                began = time.thread_time()
                masks = self._choose(self._matcher, found, most, choose, began + COSTLY_SECONDS)
                taken = time.thread_time() - began
                self._company.chose(taken)
                if masks:
                    self._costly = self._company.is_costly(self, taken / masks)
        finally:
            self._using.release()
        return found

    def _choose(
        self, matcher: Matcher, found: list[tuple[int, bool]], most: int, choose: Choose, until: float
    ) -> int:
        """Adds to `found` what comes behind it, until so much of the thread's time. Returns how many masks
        that took."""
        masks, told = 0, matcher.take([token for token, _ in found])
        while told == len(found) < most and time.thread_time() < until:
            mask = matcher.mask()
            if mask is None:
                break
            masks += 1
            if not found:
                self._next = mask  # which the next step asks for
            token = choose(found[-1][0] if found else None, mask)
            if token is None:
                break
            found.append((token, True))
            if token in self._ends:
                break
            told += matcher.take([token])
            forced = matcher.forced()[: most - len(found)]
            found += [(one, False) for one in forced]
            told += matcher.take(forced)
        if told:
            matcher.back(told)
        return masks

    def _find_forced(self) -> None:
        if not self._company.may_force or not self._using.acquire(blocking=False):
            return
        try:
            if self._caught_up():
                assert self._matcher is not None
                began = time.thread_time()
                self._forced, self._forced_from = self._matcher.forced(), 0
                self._company.forced(time.thread_time() - began)
        finally:
            self._using.release()

    def masks(
        self, path: Sequence[int], last: int | None = None, parents: Sequence[int] | None = None
    ) -> list[Allowed]:
        """Begins to find what may come after each beginning of the path: len(path) + 1 rows, or the `last`
        of them. Of a path that takes too long, or leaves the grammar, the rest is not found.

        `parents`: of each token, the index of the one before it, if it is not that beside it; -1 = none."""
        first = 0 if last is None else len(path) + 1 - last
        work = _threads(Queue.STEP).submit(self._masks, list(path), first, parents)
        self._work: Future[list[Mask | None]] = work

        def allowed(row: int) -> Allowed:
            return lambda: found[row] if row < len(found := work.result()) else None

        return [allowed(row) for row in range(len(path) + 1 if last is None else last)]

    def _find_next(self) -> None:
        self._work = _threads(Queue.SESSION).submit(self._first)
        self._work.add_done_callback(lambda _: self._changed())

    def _first(self) -> list[Mask | None]:
        found = self._masks([], 0)
        self._next = found[0] if found else None
        return found

    def _masks(self, path: list[int], first: int, parents: Sequence[int] | None = None) -> list[Mask | None]:
        with self._using:
            return self._masks_alone(path, first, range(-1, len(path) - 1) if parents is None else parents)

    def _masks_alone(self, path: list[int], first: int, parents: Sequence[int]) -> list[Mask | None]:
        found: list[Mask | None] = []
        self.known = ()
        try:
            if self.fault is None and self._caught_up():
                assert self._matcher is not None
                began = time.thread_time()
                told = _Told(self._matcher, path, parents, began + COSTLY_SECONDS)
                self._find(told, first, found)
                masks = told.count + (self._next is None)
                if masks:
                    taken = (time.thread_time() - began) / masks
                    self._costly = self._company.is_costly(self, taken)
                told.back(-1)
        except Exception:
            log.exception("a grammar failed")
            self.fault = "its grammar cannot be followed"
        found += [None] * (len(path) + 1 - first - len(found))
        self.known = [mask is not None for mask in found]
        return found

    def _find(self, told: _Told, first: int, found: list[Mask | None]) -> None:
        """Fills `found`, as far as the grammar and the time go."""
        matcher = told.matcher
        for row in range(len(told.path) + 1):
            if row and not told.reach(row - 1):
                if told.late:
                    return
                found.append(None)
                continue
            if row < first:
                continue
            if row == 0 and self._next is not None:
                found.append(self._next)
                continue
            mask = matcher.mask()
            if mask is None:
                if not row:
                    self.fault = matcher.fault()
                return
            found.append(mask)

    def _caught_up(self) -> bool:
        if self._matcher is None:
            self._matcher = self._start()
        if self._behind:
            behind, self._behind = self._behind, []
            self.fault = self._matcher.follow(behind)
        elif self._matcher.is_error():
            self.fault = self._matcher.fault()
        return self.fault is None


class _Told:
    """What a matcher has been told of a tree of tokens, and has to take back."""

    def __init__(self, matcher: Matcher, path: Sequence[int], parents: Sequence[int], until: float) -> None:
        """`until`: the thread's time from which on it is told no more."""
        self.matcher, self.path = matcher, path
        self.count = 0  # tokens told, those taken back included
        self.late = False
        self._parents, self._until = parents, until
        self._stands: list[int] = []  # the tokens behind which it stands

    def reach(self, node: int) -> bool:
        """Lets it stand behind a token, and returns whether it does: that may not be allowed there, or what
        is before it was not."""
        parent = self._parents[node]
        self.back(parent)
        self.late = time.thread_time() > self._until
        if (self._stands[-1] if self._stands else -1) != parent or self.late:
            return False
        if not self.matcher.take([self.path[node]]):
            return False
        self._stands.append(node)
        self.count += 1
        return True

    def back(self, node: int) -> None:
        """Takes back what stands behind a token; -1 = everything."""
        behind = 0
        while self._stands and self._stands[-1] > node:
            self._stands.pop()
            behind += 1
        if behind:
            self.matcher.back(behind)


class Grammars:
    """What texts of one tokenizer may be made to obey."""

    def __init__(
        self,
        tokenizer_json: str,
        eos_token_ids: Sequence[int],
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is built before the first grammar comes. `vocab_size`: of the model; None = as the
        tokenizer's. `clock` gives seconds."""
        self._size = vocab_size
        self._company = Company(clock)
        self._json = tokenizer_json
        self._eos = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._prepared: Future[None] | None = None  # from the first place on

    def prepare(self) -> None:
        """Builds what all grammars of the tokenizer share, if it has any."""
        with suppress(Exception):  # told with the first grammar
            self._built()

    def check(self, grammar: str) -> None:
        """Raises InvalidRequest if texts cannot obey it here. Takes its time: not for an event loop."""
        fault = _threads(Queue.ALL).submit(self._fault, grammar).result()
        if fault is not None:
            raise InvalidRequest(fault)

    def place(self, grammar: str, output: Sequence[int], changed: Callable[[], object]) -> Place:
        """Returns where a text is that has come so far."""
        if self._prepared is None:  # all texts that come meanwhile wait for it
            self._prepared = _threads(Queue.ALL).submit(self.prepare)
        prepared = self._prepared

        def start() -> Matcher:
            prepared.result()
            return self._compile(grammar)

        return Place(start, output, changed, self._company, self._eos)

    def _fault(self, grammar: str) -> str | None:
        try:
            matcher = self._compile(grammar)
        except Exception as error:
            log.info("a tokenizer has no grammars: %s", error)
            return "the model's tokenizer is of a kind that no grammar can be used with"
        return matcher.fault() if matcher.is_error() or matcher.mask() is None else None

    def _compile(self, grammar: str) -> Matcher:
        return Matcher(self._built(), grammar, self._size)

    def _built(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = LLTokenizer(self._json, eos_token=list(self._eos))
        return self._tokenizer


@lru_cache(maxsize=8)
def load(tokenizer_json: str, eos_token_ids: tuple[int, ...]) -> Grammars:
    """Returns the grammars of a tokenizer, built once."""
    return Grammars(tokenizer_json, eos_token_ids)


class Queue(Enum):
    """Queues of work, by who waits for it."""

    STEP = "step"  # all sessions of an engine's step
    SESSION = "session"  # one session
    ALL = "all"  # all that have a grammar; or one request, in a process that is bounded otherwise


@lru_cache
def _threads(queue: Queue) -> ThreadPoolExecutor:
    """Returns the threads of this process that work on it, which stand from now on."""
    gives_way = queue is Queue.SESSION and sys.platform == "linux"  # elsewhere niceness is the process's
    threads = ThreadPoolExecutor(2, f"grammar {queue.value}", os.nice, (NICENESS if gives_way else 0,))
    both = threading.Barrier(2)
    before = threading.stack_size(STACK_BYTES)
    try:
        for future in [threads.submit(both.wait) for _ in range(2)]:
            future.result()
    finally:
        threading.stack_size(before)
    return threads
