"""Protobuf messages of any type by their descriptors: valid, nearly valid and hostile. And mere bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

Values = Mapping[str, st.SearchStrategy[Any]]
"""Strategies for fields, by `Message.field` or by the field's name alone; they go before what types say."""

_F = FieldDescriptor
_RANGES = {
    _F.TYPE_UINT32: (0, 2**32 - 1),
    _F.TYPE_UINT64: (0, 2**64 - 1),
    _F.TYPE_FIXED64: (0, 2**64 - 1),
    _F.TYPE_INT32: (-(2**31), 2**31 - 1),
    _F.TYPE_INT64: (-(2**63), 2**63 - 1),
}
MOST_ITEMS = 6


def messages(kind: type[Message], values: Values, depth: int = 3) -> st.SearchStrategy[Any]:
    """Messages of a type. Every field may be absent."""
    return _built(kind.DESCRIPTOR, values, depth)


def _built(descriptor: Descriptor, values: Values, depth: int) -> st.SearchStrategy[Any]:
    kind = message_factory.GetMessageClass(descriptor)
    fields = {field.name: _field(field, values, depth) for field in descriptor.fields}
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: _filled(kind, chosen))


def _filled(kind: Any, chosen: Mapping[str, Any]) -> Message:
    message: Message = kind()
    for name, value in chosen.items():
        if value is not None:
            message.MergeFrom(kind(**{name: value}))
    return message


def _field(field: FieldDescriptor, values: Values, depth: int) -> st.SearchStrategy[Any]:
    known = values.get(f"{field.containing_type.name}.{field.name}", values.get(field.name))
    if known is not None:
        return known
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = (_scalar(entry.fields_by_name[name], values, depth) for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=MOST_ITEMS)
    if field.is_repeated and field.type == _F.TYPE_MESSAGE and not depth:
        return st.just([])
    one = _scalar(field, values, depth)
    return st.lists(one, max_size=MOST_ITEMS) if field.is_repeated else one


def _scalar(field: FieldDescriptor, values: Values, depth: int) -> st.SearchStrategy[Any]:
    if field.type == _F.TYPE_MESSAGE:
        return _built(field.message_type, values, depth - 1) if depth else st.none()
    if field.type in _RANGES:
        return integers(*_RANGES[field.type])
    if field.type in (_F.TYPE_DOUBLE, _F.TYPE_FLOAT):
        return st.floats(width=64 if field.type == _F.TYPE_DOUBLE else 32)
    if field.type == _F.TYPE_BOOL:
        return st.booleans()
    if field.type == _F.TYPE_ENUM:
        return st.integers(0, 5)
    if field.type == _F.TYPE_BYTES:
        return st.binary(max_size=40)
    return st.text(max_size=40)


def integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Small ones mostly, and the edges."""
    edges = [low, high, high - 1, high // 2 + 1]
    return st.one_of(st.integers(0, 20), st.integers(0, 20), st.sampled_from(edges), st.integers(low, high))


def damaged(whole: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """The bytes of messages, cut, changed or lengthened; or any bytes."""

    @st.composite
    def changed(draw: st.DrawFn) -> bytes:
        raw = bytearray(draw(whole).SerializeToString())
        for _ in range(draw(st.integers(1, 4))):
            at = draw(st.integers(0, len(raw)))
            raw[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=4))
        return bytes(raw)

    return st.one_of(changed(), st.binary(max_size=200))
