"""How a model is named: a folder, a GGUF file, or a Hugging Face id with what is wanted of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

GGUF = ".gguf"
HUB_ID = re.compile(r"(?P<id>[^@:]+)(?::(?P<gguf>[^@:]+))?(?:@(?P<revision>[^@:]+))?")


@dataclass(frozen=True, slots=True)
class HubId:
    """OWNER/NAME, perhaps with :QUANT, one of a repository's GGUF files by a part of its name, and with
    @REVISION, a branch, tag or commit."""

    id: str
    gguf: str | None = None
    revision: str | None = None


def is_path(model: str) -> bool:
    """Returns True if the name can only be one of a folder or file."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def parse_hub_id(model: str) -> HubId | None:
    """Returns what a Hugging Face id says; None if it is none."""
    found = None if is_path(model.partition("@")[0]) else HUB_ID.fullmatch(model)
    return HubId(**found.groupdict()) if found else None


def checkpoint_name(model: str) -> str:
    """Returns the last part of a checkpoint's path or hub id, without what says which file or revision."""
    hub = parse_hub_id(model)
    last = (hub.id if hub else model).rstrip("/").rpartition("/")[2]
    return last.removesuffix(GGUF) or model
