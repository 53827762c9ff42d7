"""Calls that are a function and its parameters, each between tags, as they come; told as JSON. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence

from router.tool_formats import ToolFormat, beginning
from router.tool_parser import MAX_HELD, CallParser
from router.xml_calls import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END

# Of a value: what a string may begin, go on or end with, and where the value ends. If it begins on a line of
# its own its end does, too: one within a string is the string's.
SIGN = re.compile(rf'\\.|["\n]|{PARAMETER_END}')


class XmlCallParser(CallParser):
    """A parameter that is a text is told as it comes, any other when it is whole."""

    def __init__(
        self,
        form: ToolFormat,
        call_id: Callable[[int], str],
        *,
        several: bool = True,
        json_parameters: Mapping[str, Sequence[str]],
    ) -> None:
        """`json_parameters`: by function, its parameters that are no texts."""
        super().__init__(form, call_id, several=several)
        self._json_parameters = json_parameters
        self._function = ""
        self._between = ""  # what stands before the next parameter
        self._quoted = False  # whether a value is read up to within a string

    def _opened(self) -> bool:
        start = self._behind_blanks(self._at)
        if start - self._at >= MAX_HELD:
            return self._no_call()
        found = self._tag(FUNCTION, start)
        if found is None:
            return self._no_call() if self._is_over(FUNCTION, start) else False
        self._function, end = found
        self._call(self._function, whole=False)
        self._argue("{")
        self._held, self._between = self._held[end:], ""
        self._read = self._parameters
        return True

    def _parameters(self) -> bool:
        """Between two parameters."""
        self._held = self._held.lstrip()
        if found := self._tag(PARAMETER, 0):
            name, end = found
            is_text = name not in self._json_parameters.get(self._function, ())
            key = json.dumps(name, ensure_ascii=False)
            self._argue(f"{self._between}{key}: {chr(34) * is_text}")
            self._held, self._between, self._at, self._quoted = self._held[end:], ", ", 0, False
            self._read = self._text_begins if is_text else self._value
            return True
        rest = self._held
        if not self._is_over(PARAMETER, 0) or (FUNCTION_END.startswith(rest) and rest != FUNCTION_END):
            return False
        self._argue("}")
        self.calling = False
        self._held = rest.removeprefix(FUNCTION_END)
        self._read = self._after
        return True

    def _text_begins(self) -> bool:
        if not self._held:
            return False
        self._held = self._held.removeprefix("\n")
        self._read = self._text_goes_on
        return True

    def _text_goes_on(self) -> bool:
        text, end, rest = self._held.partition(PARAMETER_END)
        if end:
            self._argue(_escaped(text.removesuffix("\n")) + '"')
            self._held, self._read = rest, self._parameters
            return True
        told = len(text) - max(beginning(text, PARAMETER_END), beginning(text, "\n" + PARAMETER_END))
        self._argue(_escaped(text[:told]))
        self._held = text[told:]
        return False

    def _value(self) -> bool:
        held = self._held
        while found := SIGN.search(held, self._at):
            sign, self._at = found[0], found.end()
            if sign == PARAMETER_END and not (self._quoted and held.startswith("\n")):
                self._argue(_as_json(held[: found.start()].strip()))
                self._held, self._read = held[self._at :], self._parameters
                return True
            if sign in ('"', "\n"):  # a string has no bare line break
                self._quoted = sign == '"' and not self._quoted
            elif sign != PARAMETER_END and not self._quoted:
                self._at = found.start() + 1
        self._at = max(self._at, len(held) - max(beginning(held, PARAMETER_END), held.endswith("\\")))
        return False

    def _tag(self, begin: str, start: int) -> tuple[str, int] | None:
        """Returns the name in a tag, and where it ends."""
        if not self._held.startswith(begin, start):
            return None
        end = self._held.find(">", start, start + MAX_HELD)
        name = self._held[start + len(begin) : end].strip() if end > 0 else ""
        return (name, end + 1) if name else None

    def _is_over(self, begin: str, start: int) -> bool:
        """Returns whether what is held at a place cannot become such a tag."""
        rest = self._held[start : start + MAX_HELD]
        begins = rest.startswith(begin) if len(rest) >= len(begin) else begin.startswith(rest)
        return not begins or len(rest) == MAX_HELD or ">" in rest


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """Returns the value as JSON; as a text if it is none."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
