"""The header of a GGUF file, gone through before anything else reads the file: what it says is in the file.

The reader that transformers uses believes it. A file of forty bytes that tells of 2**60 entries would take
all memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from math import prod
from pathlib import Path
from struct import Struct
from typing import BinaryIO

import numpy as np

from outrider.engine.other_formats import pointer
from outrider.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_FIELDS = MOST_TENSORS = 65_536
MOST_ELEMENTS = 2**22  # of all arrays: each takes a kilobyte in that reader
MOST_TEXT = 16 * 2**20  # bytes
MOST_DIMENSIONS = 4
TYPE = b"general.type"
PARTS = {  # of a model, and what to do
    b"adapter": "an adapter, not a model: give the model that it is for; --lora takes one as peft saves it",
    b"mmproj": "what reads images for a model, not the model: give the other file",
}
LAYERS, MOST_LAYERS = b".block_count", 4096
ALIGNMENT, USUAL_ALIGNMENT = "general.alignment", 32

_U32, _U64, _COUNTS = Struct("<I"), Struct("<Q"), Struct("<IQQ")
_STRING, _ARRAY = 8, 9  # types of a field, as the format numbers them
_SIZES = {0: 1, 1: 1, 7: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 10: 8, 11: 8, 12: 8}  # bytes of a number


class _Damaged(Exception):
    """Says why, as the end of a sentence."""


def check_header(file: Path) -> None:
    """Raises StartupError unless the file is a GGUF file of a model that holds all that its header tells of,
    in types that can be read."""
    try:
        with file.open("rb") as content:
            header = _Header(content, file.stat().st_size)
            kinds = header.check()
    except _Damaged as why:
        raise StartupError(
            pointer(file) or f"{file} is damaged, or no GGUF file that is read here: {why}; fetch it again"
        ) from None
    if header.part in PARTS:
        raise StartupError(f"{file} holds {PARTS[header.part]}")
    for kind, name in kinds.items():
        if (unread := _unread(kind)) is not None:
            raise StartupError(
                f"{file} holds {name} in {unread}, a type that is not read here; give the model in another, "
                "such as Q8_0 or Q4_K_M"
            )


def _unread(kind: int) -> str | None:
    """Returns the name of a type of tensors, if what transformers reads them with cannot read it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    known = GGMLQuantizationType(kind)
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[known][1]), np.uint8), known)
    except NotImplementedError:
        return known.name
    return None


class _Header:
    def __init__(self, content: BinaryIO, size: int) -> None:
        self._content, self._size = content, size
        self._elements = 0
        self._kinds: dict[int, str] = {}
        self.part = b""  # of a model, if it is not the whole

    def check(self) -> dict[int, str]:
        """Returns the types that tensors have, and of each the name of one."""
        if self._read(len(MAGIC)) != MAGIC:
            raise _Damaged("it does not begin as one")
        version, tensors, fields = _COUNTS.unpack(self._read(_COUNTS.size))
        if version not in VERSIONS:
            raise _Damaged(f"its version is {version}, not {' or '.join(map(str, VERSIONS))}")
        if fields > MOST_FIELDS or tensors > MOST_TENSORS:
            raise _Damaged(f"it tells of {fields} fields and {tensors} tensors; {MOST_TENSORS} are the most")
        alignment = USUAL_ALIGNMENT
        for _ in range(fields):
            name = self._text()
            value = self._value(self._number(_U32))
            if name == TYPE:
                self.part = value or b""
            if name.endswith(LAYERS) and int.from_bytes(value or b"", "little") > MOST_LAYERS:
                raise _Damaged(f"it tells of more than {MOST_LAYERS} layers")
            if name == ALIGNMENT.encode():
                alignment = max(int.from_bytes(value or b"", "little"), 1)
        ends = list(self._tensors(tensors))
        begin = -(-self._content.tell() // alignment) * alignment
        if ends and max(ends) > self._size - begin:
            raise _Damaged("it is cut short: a tensor reaches beyond its end")
        return self._kinds

    def _tensors(self, count: int) -> Iterator[int]:
        """Yields where each tensor ends, in bytes from where they begin."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # needed for such files alone

        for _ in range(count):
            name = self._text().decode(errors="replace")
            dimensions = self._number(_U32)
            if dimensions > MOST_DIMENSIONS:
                raise _Damaged(f"the tensor {name} has {dimensions} dimensions")
            elements = prod(self._number(_U64) for _ in range(dimensions))
            kind = self._number(_U32)
            if kind not in GGML_QUANT_SIZES:
                raise _Damaged(f"the tensor {name} is of an unknown type, {kind}")
            self._kinds.setdefault(kind, name)
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
            yield self._number(_U64) + elements // block * size

    def _value(self, kind: int) -> bytes | None:
        """Passes a field's value. Returns its bytes, if it is a number or a text."""
        if kind in _SIZES:
            return self._read(_SIZES[kind])
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            self._array(self._number(_U32), self._number(_U64))
        else:
            raise _Damaged(f"a field is of an unknown type, {kind}")
        return None

    def _array(self, kind: int, count: int) -> None:
        self._elements += count
        if self._elements > MOST_ELEMENTS:
            raise _Damaged(f"its lists have more than {MOST_ELEMENTS} elements")
        if kind == _STRING:
            for _ in range(count):
                self._text()
        elif kind in _SIZES:
            self._pass(count * _SIZES[kind])
        else:
            raise _Damaged(f"a list is of elements of type {kind}")

    def _text(self) -> bytes:
        size = self._number(_U64)
        if size > MOST_TEXT:
            raise _Damaged(f"a text has {size} bytes; {MOST_TEXT} are the most")
        return self._read(size)

    def _number(self, layout: Struct) -> int:
        (number,) = layout.unpack(self._read(layout.size))
        return int(number)

    def _read(self, count: int) -> bytes:
        found = self._content.read(count)
        if len(found) < count:
            raise _Damaged("it ends amid its header")
        return found

    def _pass(self, count: int) -> None:
        if self._content.tell() + count > self._size:
            raise _Damaged("it ends amid its header")
        self._content.seek(count, os.SEEK_CUR)
