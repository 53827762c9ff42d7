"""One `outrider serve` for who has a key: what the page and the tools of who runs it are tried on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from router.api.keys import digest, new_key
from tests.e2e.conftest import Serve, start


@dataclass
class KeyedService:
    """It, and the key."""

    serve: Serve
    key: str

    @property
    def url(self) -> str:
        return self.serve.url


@contextmanager
def keyed_service(folder: Path, *arguments: str) -> Iterator[KeyedService]:
    """`folder`: for the file of its keys."""
    key, file = new_key(), folder / "keys"
    file.write_text(f"alice sha256:{digest(key).hex()}\n")
    serve = start("--seed", "7", "--no-compare", "--api-keys", str(file), *arguments)
    yield KeyedService(serve, key)
    serve.end()
