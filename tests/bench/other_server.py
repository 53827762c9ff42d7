"""An OpenAI-compatible server that is not ours: strict about unknown fields, and tells no tokens by piece."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KNOWN = {"model", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(200, {"object": "list", "data": [{"id": "other", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked: list[dict[str, Any]] = self.server.asked  # type: ignore[attr-defined]
        asked.append(body)
        unknown = set(body) - KNOWN or set(body.get("stream_options", {})) - {"include_usage"}
        if unknown:
            self._say(400, {"error": {"message": f"Unrecognized request argument: {sorted(unknown)[0]}"}})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for number in range(0, body["max_tokens"], 2):  # two tokens a piece
            self._event({"choices": [{"index": 0, "text": f"{number:2}ab", "finish_reason": None}]})
        usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
        if body.get("stream_options", {}).get("include_usage"):
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _say(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def other_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Its address, and the bodies of what it is asked."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.asked  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
