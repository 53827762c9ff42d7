"""The calls of tools in a text: text in as it comes; out come the text that calls nothing, and the calls.

Pure. What comes out does not depend on where the text was cut, and no part of a call comes out as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from router.tool_formats import CALL_ID, ToolFormat, beginning

MAX_HELD = 1024  # characters that wait until it is known if they are a call's

# The beginning of a call, up to its arguments:
HEADER = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"((?:[^"\\]|\\.)+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{\s*["}])',
    re.DOTALL,
)
FIRST_KEY = re.compile(r'\{\s*(?:"([^"]*)("?))?')
KEYS = ("name", "arguments", "parameters", "type", "id")
OUTSIDE_STRINGS = re.compile(r"[\s\w{}\[\]:,.+-]", re.ASCII)  # of JSON: any other character is a fault


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call: its beginning, or more of its arguments."""

    index: int  # of the call in its answer
    arguments: str = ""
    id: str = ""  # told at the beginning, as is
    name: str = ""


def joined(deltas: Iterable[CallDelta]) -> tuple[CallDelta, ...]:
    """Returns one piece for each call."""
    of_call: dict[int, CallDelta] = {}
    for delta in deltas:
        last = of_call.get(delta.index)
        whole = delta if last is None else replace(last, arguments=last.arguments + delta.arguments)
        of_call[delta.index] = whole
    return tuple(of_call.values())


@dataclass(slots=True)
class Call:
    """A call of a tool, as far as it has come."""

    id: str
    name: str
    arguments: str = ""  # as the model wrote them: mostly JSON


@dataclass(slots=True)
class _Json:
    """Where a text is in a JSON value that it began."""

    depth: int = 0
    in_string: bool = False
    escaped: bool = False

    def end(self, text: str, start: int, most: int | None = None) -> tuple[int, bool]:
        """Returns where the value ends, or a fault comes, or the text ends; and whether the value is over."""
        for at in range(start, len(text) if most is None else min(len(text), most)):
            character = text[at]
            if self.in_string:
                if self.escaped:
                    self.escaped = False
                elif character == "\\":
                    self.escaped = True
                elif character == '"':
                    self.in_string = False
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return at + 1, True
            elif not OUTSIDE_STRINGS.match(character):
                return at, True
        return len(text), False


class CallParser:
    """Finds the calls in one text. What follows a call is not told: a model has nothing to say before it has
    the result.

    Arguments come as the model writes them; what is no call, though it began as one, is text."""

    def __init__(self, form: ToolFormat, call_id: Callable[[int], str], *, several: bool = True) -> None:
        """`call_id` gives the id of the call at an index. If not `several`, only the first call is told."""
        self.calls: list[Call] = []
        self.calling = False  # the last of them is not told to its end
        self._form = form
        self._call_id = call_id
        self._several = several
        self._held = ""  # what is not told yet
        self._at = 0  # how far of it is read
        self._in_array = False
        self._json = _Json()
        self._text: list[str] = []
        self._deltas: list[CallDelta] = []
        self._muted = False  # the call is not told
        self._read: Callable[[], bool] = self._beginning if form.bare else self._outside
        self._behind: Callable[[], bool] = self._rest  # the arguments

    def push(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Returns what this text settles."""
        self._held += text
        while self._read():
            pass
        return self._told()

    def flush(self) -> tuple[str, tuple[CallDelta, ...]]:
        """Returns the rest, at the end of the text."""
        self._tell(self._held)
        self._held = ""
        return self._told()

    def _told(self) -> tuple[str, tuple[CallDelta, ...]]:
        text, deltas = "".join(self._text), tuple(self._deltas)
        self._text.clear()
        self._deltas.clear()
        return text, deltas

    def _tell(self, text: str) -> None:
        if text and not self.calls:
            self._text.append(text)

    # Each of these reads what is held, and returns whether there may be more to read.

    def _beginning(self) -> bool:
        at = self._behind_blanks(0)
        if at == len(self._held) < MAX_HELD:
            return False
        begins = at < MAX_HELD and self._held[at] in "{["
        self._read = self._opened if begins else self._outside
        return True

    def _outside(self) -> bool:
        opening = self._form.opening
        found = self._held.find(opening) if opening else -1
        size = len(self._held) if found < 0 else found
        if found < 0:
            size -= beginning(self._held, opening)
        blanks = size - len(self._held[:size].rstrip())
        told = size - min(blanks, MAX_HELD)  # blanks before a call are no part of the text
        self._tell(self._held[:told])
        self._held = self._held[told:]
        if found < 0:
            return False
        self._at = found - told + len(opening)
        self._in_array = False
        self._read = self._opened
        return True

    def _opened(self) -> bool:
        """At the place of a call."""
        start = self._behind_blanks(self._at)
        if start - self._at >= MAX_HELD:
            return self._no_call()
        if start == len(self._held):
            return False
        if self._form.naming and self._held[start] not in "{[":
            return self._named(start)
        if self._held.startswith("[", start) and not self._in_array:
            self._in_array, self._at = True, start + 1
            return True
        if not self._held.startswith("{", start):
            return self._no_call()
        if header := HEADER.match(self._held, start, start + MAX_HELD):
            name = _loaded(f'"{header[1]}"')
            if not isinstance(name, str):
                return self._no_call()
            self._call(_whole_characters(name), whole=False)
            self._held, self._json = self._held[header.end() :], _Json()
            self._read, self._behind = self._arguments, self._rest
            return True
        first = FIRST_KEY.match(self._held, start)
        assert first is not None
        if (key := first[1]) is not None and not any(
            key == known if first[2] else known.startswith(key) for known in KEYS
        ):
            return self._no_call()
        end, over = _Json().end(self._held, start, start + MAX_HELD)
        if not over:
            return self._no_call() if len(self._held) - start >= MAX_HELD else False
        return self._whole(_loaded(self._held[start:end]), end)

    def _named(self, start: int) -> bool:
        """At the name of a call whose arguments follow a marker."""
        naming = self._form.naming
        at = self._held.find(naming, start, start + MAX_HELD)
        if at < 0:
            return self._no_call() if len(self._held) - start >= MAX_HELD else False
        name = self._held[start:at].partition(CALL_ID)[0].strip()
        if not name:
            return self._no_call()
        self._call(name, whole=False)
        self._held, self._json = self._held[at + len(naming) :], _Json()
        self._read, self._behind = self._named_arguments, self._after
        return True

    def _named_arguments(self) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._arguments if self._held[0] == "{" else self._outside
        return bool(self._held)

    def _whole(self, told: object, end: int) -> bool:
        """An object that does not begin as calls mostly do may be one all the same."""
        if not isinstance(told, dict) or not (isinstance(name := told.get("name"), str) and name):
            return self._no_call()
        arguments = told.get("arguments", told.get("parameters", {}))
        if not isinstance(arguments, dict | str):
            return self._no_call()
        try:
            text = arguments
            if not isinstance(text, str):
                text = json.dumps(text, ensure_ascii=False, allow_nan=False)
        except ValueError:  # a number that is too large to be told
            return self._no_call()
        self._call(_whole_characters(name))
        self._argue(_whole_characters(text))
        self._held = self._held[end:]
        self._read = self._after
        return True

    def _arguments(self) -> bool:
        end, over = self._json.end(self._held, 0)
        self._argue(self._held[:end])
        self._held = self._held[end:]
        if over:
            self._json = _Json(depth=1)
            self.calling, self._read = False, self._behind
        return over

    def _rest(self) -> bool:
        """After the arguments, up to the end of the object."""
        end, over = self._json.end(self._held, 0)
        self._held = self._held[end:]
        if over:
            self._read = self._after
        return over

    def _after(self) -> bool:
        """After a call."""
        at = self._behind_blanks(0)
        rest, closing = self._held[at : at + max(1, len(self._form.closing))], self._form.closing
        if not rest:
            self._held = ""
            return False
        if rest[0] in (",]" if self._in_array else ";"):
            self._held, self._at = self._held[at + 1 :], 0
            self._in_array = self._in_array and rest[0] == ","
            self._read = self._after if rest[0] == "]" else self._opened
            return True
        if closing.startswith(rest) and rest != closing:
            return False
        self._held = self._held[at + len(closing) if closing and rest == closing else at :]
        self._read = self._outside
        return True

    def _no_call(self) -> bool:
        """What is held looked like a call, and is none."""
        self._tell(self._held[: self._at])
        self._held, self._at = self._held[self._at :], 0
        self._in_array = False
        self._read = self._outside
        return True

    def _behind_blanks(self, at: int) -> int:
        return len(self._held) - len(self._held[at:].lstrip())

    def _call(self, name: str, *, whole: bool = True) -> None:
        index = len(self.calls)
        self._muted = index > 0 and not self._several
        if not self._muted:
            self.calling = not whole
            self.calls.append(Call(self._call_id(index), name))
            self._deltas.append(CallDelta(index, "", self.calls[-1].id, name))

    def _argue(self, arguments: str) -> None:
        if arguments and not self._muted:
            self.calls[-1].arguments += arguments
            self._deltas.append(CallDelta(len(self.calls) - 1, arguments))


def _loaded(text: str) -> object:
    """Returns the JSON value; None if it is none."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _whole_characters(text: str) -> str:
    """JSON may hold half of a surrogate pair."""
    return text.encode(errors="replace").decode()
