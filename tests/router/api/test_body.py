"""Bodies: what is refused before anything is made of it, and how little a refusal costs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from outrider.errors import InvalidRequest, Overloaded, TooLarge, TooSlow
from router.api.body import (
    FREE_BYTES,
    MAX_DIGITS,
    MAX_FRACTIONS,
    MAX_NESTED,
    MAX_STRINGS,
    MAX_VALUES,
    Bodies,
    decoded,
)

ROOT = Path(__file__).parents[3]
TIMES = 20  # a refusal may cost so many times the bytes that it refuses

# Bodies of a megabyte, each of many small things and in a process of its own; then the most that one cost.
PROGRAM = """
import os
from outrider.errors import InvalidRequest
from router.api.body import decoded
from router.api import generation_wire
from router.api.schema import ChatRequest, CompletionRequest, parse

def peak(kind, body):
    child = os.fork()
    if child == 0:
        told = 1000
        try:
            parse(kind, decoded(body))
        except InvalidRequest as error:
            told = len(error.message) + len(error.field or "")
        os._exit(told >= 1000)
    _, status, used = os.wait4(child, 0)
    assert status == 0, body[:100]
    return used.ru_maxrss * 1024

costs = []
def refused(kind, body):
    costs.append((peak(kind, body) - peak(kind, b"{}")) / len(body))

def many(head, item, tail, size=2**20):
    return head + b",".join([item] * (size // (len(item) + 1))) + tail

for item in (b"{}", b"[]", b"0", b"300", b'"ab"', b'{"":0}', b"[0]", b"{"):
    for kind, head in (
        (ChatRequest, b'{"messages":['), (CompletionRequest, b'{"prompt":"a","stop":['),
        (CompletionRequest, b'{"n":"a","prompt":['),
    ):
        refused(kind, many(head, item, b"]}"))
fields = b",".join(b'"%x":0' % number for number in range(2**17))
refused(CompletionRequest, b'{"prompt":"a",' + fields + b"}")
refused(CompletionRequest, b'{"prompt":"a","logit_bias":{' + fields + b"}}")
for text in ("x", "\\N{GRINNING FACE}", "\\\\u00e9", '\\\\"'):
    long = (text * 2**20)[:2**20].encode()[: 2**20]
    refused(CompletionRequest, b'{"prompt":"a","model":"' + long[: len(long) - len(long) % 12] + b'"}')
    refused(CompletionRequest, b'{"' + long[: len(long) - len(long) % 12] + b'":0}')
def decode(kind, body):
    generation_wire.body(body)

parse, decoded = decode, bytes
for body in (b"\\x5a\\0", b"\\x08\\1", b"\\x22\\2\\x0a\\0"):
    refused(None, body * (2**20 // len(body)))
inner = b"\\x0a\\0" * 2**19
refused(None, b"\\x22\\x80\\x80\\x40" + inner)
refused(None, b"\\x1a\\x80\\x80\\x80\\1" + b"\\x0a\\xfa\\xff\\x7f" + bytes(2**21))
print(max(costs))
"""


def test_a_refusal_costs_a_bounded_multiple_of_its_bytes() -> None:
    """In a process of its own, as the libraries that check a body have memory that Python does not know."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < TIMES


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"[" + b",".join([b"1"] * (MAX_VALUES + 2)) + b"]", f"has {MAX_VALUES + 1} values"),
        (b'["' + b'","'.join([b"a"] * (MAX_STRINGS + 1)) + b'"]', f"has {MAX_STRINGS + 1} strings"),
        (b"[" + b",".join([b"{}"] * MAX_NESTED) + b"]", f"has {MAX_NESTED + 1} objects and arrays"),
        (b"[" + b",".join([b"1.5e3"] * MAX_NESTED) + b",.1]", f"has {MAX_FRACTIONS + 1} fractions"),
        (b"[-" + b"7" * (MAX_DIGITS + 1) + b"]", f"a number is too long, of more than {MAX_DIGITS} digits"),
        (b"[1." + b"3" * (MAX_DIGITS + 1) + b"]", f"a number is too long, of more than {MAX_DIGITS} digits"),
        ('["é"]'.encode("utf-16"), "must be in UTF-8"),
    ],
)
def test_what_a_body_has_too_many_of_is_told(body: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decoded(body)


def test_as_many_fractions_and_digits_as_may_be() -> None:
    assert decoded(b"[true,false" + b",1.5" * MAX_FRACTIONS + b"]") == [True, False, *[1.5] * MAX_FRACTIONS]
    digits = "7" * MAX_DIGITS
    assert decoded(f'["{digits}7",{digits}]'.encode()) == [f"{digits}7", int(digits)]


FINITE = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(alphabet='\\",{}[]ab\n é😀', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('\\",{[a', max_size=5), inner, max_size=4)
    ),
    max_leaves=30,
)


def counted(value: Any) -> tuple[int, int, int, int]:
    """(strings, objects and arrays, commas, fractions and exponents) of a value."""
    if isinstance(value, str):
        return 1, 0, 0, 0
    if isinstance(value, float):
        return 0, 0, 0, sum(map(json.dumps(value).count, ".e"))
    if not isinstance(value, list | dict):
        return 0, 0, 0, 0
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    totals = [sum(column) for column in zip(*map(counted, inner), strict=True)] or [0] * 4
    return totals[0], totals[1] + 1, totals[2] + max(len(value) - 1, 0), totals[3]


@given(json_values, st.booleans())
def test_what_stands_in_a_string_is_not_counted(value: Any, ascii_only: bool) -> None:
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("router.api.body._check_count", lambda what, count, most: seen.append(count))
        assert decoded(json.dumps(value, ensure_ascii=ascii_only).encode()) == value
    assert tuple(seen) == counted(value)


def sent(chunks: Sequence[bytes | None], headers: dict[str, str] | None = None) -> Request:
    """A request whose body comes in these chunks. A None never comes."""
    left = list(chunks)

    async def receive() -> Any:
        chunk = left.pop(0)
        if chunk is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": chunk, "more_body": bool(left)}

    raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


async def test_a_body_that_is_told_to_be_too_large_is_not_taken_in() -> None:
    for length in ("11", "9" * 5000):
        with pytest.raises(TooLarge):
            await Bodies(10).read(sent([None], {"content-length": length}))
    assert await Bodies(10).read(sent([b"0123456789"], {"content-length": "10"})) == b"0123456789"


async def test_a_body_that_does_not_come_is_given_up() -> None:
    with pytest.raises(TooSlow):
        await Bodies(grace=0.0).read(sent([b"", None]))


async def test_all_bodies_together_are_bounded_and_small_ones_always_come_in() -> None:
    large = b" " * (FREE_BYTES + 100)
    bodies = Bodies(max_held=150)
    first = asyncio.create_task(bodies.read(sent([large, None])))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await bodies.read(sent([large, b""]))
    assert await bodies.read(sent([b"{}"])) == b"{}"
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await bodies.read(sent([large])) == large


async def test_the_bodies_of_one_key_leave_room_for_those_of_another() -> None:
    large = b" " * (FREE_BYTES + 100)
    bodies = Bodies(max_held=300)
    first = asyncio.create_task(bodies.read(sent([large, None]), "alice"))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await bodies.read(sent([large, b""]), "alice")
    assert await bodies.read(sent([large]), "bob") == large
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await bodies.read(sent([large]), "alice") == large
