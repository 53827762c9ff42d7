"""The page at `/`: its files are in router/page/, and are sent as they lie there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files

from fastapi import FastAPI, Request
from fastapi.responses import Response

FOLDER = files("router") / "page"
KINDS: Mapping[str, str] = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
# Nothing comes from elsewhere, nothing written inline runs, and no other site's page shows it in a frame.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "cache-control": "no-cache",  # it is asked for again, and answered by 304 if it is the same
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    kind: str
    tag: str


def _read(name: str) -> File:
    content = (FOLDER / name).read_bytes()
    return File(content, KINDS[name.rpartition(".")[2]], f'"{sha256(content).hexdigest()[:32]}"')


_NAMES = sorted(each.name for each in FOLDER.iterdir() if each.name.rpartition(".")[2] in KINDS)
FILES: Mapping[str, File] = {"/" if name == "index.html" else f"/page/{name}": _read(name) for name in _NAMES}
PATHS = frozenset(FILES)


def add_page(app: FastAPI) -> None:
    """The application shows the page, too."""
    for path, file in FILES.items():
        app.add_api_route(path, _answering(file), methods=["GET", "HEAD"], include_in_schema=False)


def _answering(file: File) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        headers = {**HEADERS, "etag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.kind, headers=headers)

    return answer
