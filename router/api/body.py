"""A request's body: bytes up to a limit and in time, then JSON of so many values.

What comes in is bounded before anything is made of it: a byte of JSON may become a hundred in memory.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter as Tally

from starlette.requests import Request

from outrider.errors import InvalidRequest, Overloaded, TooLarge, TooSlow

MAX_BODY_BYTES = 8 * 2**20
MAX_HELD_BYTES = 16 * MAX_BODY_BYTES  # of all bodies that are coming in
OWNERS_SHARE = 2  # one key's bodies hold at most one in so many of these bytes
FREE_BYTES = 64 * 1024  # of each body, not counted there: a small one is never refused for the large ones
GRACE_SECONDS = 10.0
SLOWEST = 64 * 1024  # bytes a second that a body must come at, after the grace

MAX_VALUES = 2**20  # numbers for the most part: token ids
MAX_STRINGS = 2**15  # names of fields too
MAX_NESTED = 2**14  # objects and arrays
MAX_FRACTIONS = 2**15  # and exponents: such a number takes up to thirty times as long as an integer
MAX_DIGITS = 512  # of a number: the time of an integer grows with their square
MAX_DEPTH = 100  # of these within one another: what takes them apart calls itself for each


class Bodies:
    """Takes in the bodies of requests: at most so many bytes of one, and of all that are not complete yet."""

    def __init__(
        self, max_bytes: int = MAX_BODY_BYTES, max_held: int = MAX_HELD_BYTES, grace: float = GRACE_SECONDS
    ) -> None:
        """`grace` is in seconds."""
        self._max_bytes = max_bytes
        self._max_held = max_held
        self._grace = grace
        self._held: Tally[str] = Tally()  # bytes, by owner

    async def read(self, request: Request, owner: str = "") -> bytearray:
        """Returns the body. Never holds more of it than the limit, whatever the content-length says.
        `owner`: name of the request's key, or "".

        Raises TooLarge, TooSlow, Overloaded, or InvalidRequest if it is compressed."""
        encoding = request.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise InvalidRequest(f"content-encoding {encoding} is not supported: send the body as it is")
        length = request.headers.get("content-length", "")
        if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > self._max_bytes):
            raise too_large(self._max_bytes)
        body, held = bytearray(), 0
        until = asyncio.get_running_loop().time() + self._grace
        try:
            async with asyncio.timeout_at(until) as limit:
                async for chunk in request.stream():
                    if len(body) + len(chunk) > self._max_bytes:
                        raise too_large(self._max_bytes)
                    body += chunk
                    more = max(len(body) - FREE_BYTES, 0) - held
                    most = self._max_held // OWNERS_SHARE if owner else self._max_held
                    if self._held.total() + more > self._max_held or self._held[owner] + more > most:
                        raise Overloaded("too many large bodies are coming in; try again shortly")
                    self._held[owner] += more
                    held += more
                    limit.reschedule(until + len(body) / SLOWEST)
        except TimeoutError:
            raise TooSlow(
                f"the body did not come in time: at least {SLOWEST} bytes a second after {self._grace:g} s"
            ) from None
        finally:
            self._held[owner] -= held
            if not self._held[owner]:
                del self._held[owner]
        return body


def too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is over the limit of {max_bytes} bytes")


def decoded(body: bytes | bytearray) -> object:
    """Returns the JSON value. Raises InvalidRequest that says where the JSON is broken, or what it has too
    many of. Takes time and memory that grow with the body. Also for JSON in a text of the body."""
    _check_counts(body)
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: byte {error.start} is not UTF-8") from None
    except (ValueError, RecursionError):  # an integer of thousands of digits; nesting thousands deep
        raise InvalidRequest(
            "the body is not valid JSON: a number is too long or the nesting too deep"
        ) from None


def _check_counts(body: bytes | bytearray) -> None:
    """Counts what the JSON holds before anything is made of it.

    Up to where it is broken, if it is, the counts are right: the decoder comes no further."""
    if body.count(b"\0"):  # UTF-16 and UTF-32, which json.loads would take
        raise InvalidRequest("the body is not valid JSON: it must be in UTF-8, without null bytes")
    # First what stands for a quotation mark inside of a string goes; the others are then where strings begin
    # and end, and every second piece is outside of them.
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_count("strings", bare.count(b'"') // 2, MAX_STRINGS)
    outside = b"".join(bare.split(b'"')[::2])
    _check_count("objects and arrays", outside.count(b"{") + outside.count(b"["), MAX_NESTED)
    _check_count("values", outside.count(b","), MAX_VALUES)
    words = outside.count(b"true") + outside.count(b"false")
    fractions = outside.count(b".") + outside.count(b"e") + outside.count(b"E") - words
    _check_count("fractions and exponents", fractions, MAX_FRACTIONS)
    if outside.translate(_ZEROS).find(b"0" * (MAX_DIGITS + 1)) >= 0:
        raise InvalidRequest(
            f"the body is not valid JSON: a number is too long, of more than {MAX_DIGITS} digits"
        )
    if _too_deep(outside):
        raise InvalidRequest(f"the body is nested more than {MAX_DEPTH} deep: send what is flatter")


def _too_deep(outside: bytes) -> bool:
    """Returns False, too, where brackets do not match: the decoder tells where."""
    brackets = outside.translate(_ROUND, _NO_BRACKETS)
    if brackets.count(b"(") != brackets.count(b")"):
        return False
    for _ in range(MAX_DEPTH):
        brackets = brackets.replace(b"()", b"")
    return b"()" in brackets


_ROUND = bytes.maketrans(b"[]{}", b"()()")
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_NO_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"the body has {count} {what}, and may have {most}: send several requests")
