"""How calls of tools are found in the answers to a request: plain data, kept with the session."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.tool_formats import FORMATS
from router.tool_parser import CallParser
from router.xml_parser import XmlCallParser


@dataclass(frozen=True, slots=True)
class CallReading:
    format: str  # name of a ToolFormat
    several: bool = True
    json_parameters: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The parameters of each function that are no texts, if the format does not tell them from texts."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns the special tokens that are part of the text."""
        return FORMATS[self.format].markers

    def parser(self, session_id: bytes) -> CallParser:
        """Returns a parser of one answer. The ids of its calls follow from that of its session: they are the
        same at every router."""
        form = FORMATS[self.format]

        def call_id(index: int) -> str:
            return form.call_id(hashlib.sha256(b"call" + session_id + index.to_bytes(4)).hexdigest())

        if form.xml:
            return XmlCallParser(form, call_id, several=self.several, json_parameters=self.json_parameters)
        return CallParser(form, call_id, several=self.several)
