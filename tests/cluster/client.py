"""Asks a service over HTTP from one of the hosts."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from outrider.client import Client, Statistics
from tests.cluster.hosts import Host

Request = Mapping[str, object]


@dataclass(frozen=True)
class Answer:
    text: str
    told: Statistics


@dataclass(frozen=True)
class HostClient:
    """`url` of the service as seen from `host`."""

    host: Host
    url: str
    ca_file: Path | None = None  # the authority of its certificate

    def ask(self, request: Request, on_piece: Callable[[], None] = lambda: None) -> Answer:
        """One streamed completion; `on_piece` is called with every piece of text that comes."""
        pieces: list[str] = []
        with self.host.entered(), Client(self.url, ca_file=self.ca_file) as client:
            for piece in client.stream("/v1/completions", request):
                if isinstance(piece, Statistics):
                    return Answer("".join(pieces), piece)
                pieces.append(piece)
                on_piece()
        raise AssertionError("the stream ended without its statistics")

    def ask_together(self, requests: Sequence[Request]) -> list[Answer]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self.ask, requests))

    def models(self) -> list[str]:
        return [model["id"] for model in self._get("/v1/models").json()["data"]]

    def metric(self, name: str, labels: str = "") -> list[float]:
        """A metric's samples whose labels hold `labels`."""
        return [
            float(line.rpartition(" ")[2])
            for line in self._get("/metrics").text.splitlines()
            if line.split("{")[0].split(" ")[0] == name and labels in line
        ]

    def workers(self, role: str) -> float:
        """How many of a role the router has taken in."""
        return sum(self.metric("outrider_workers", f'role="{role}"'))

    def live(self) -> Any:
        """What `/v1/live` tells of the service now."""
        with self._http() as http, http.stream("GET", self.url + "/v1/live") as events:
            data = next(line for line in events.iter_lines() if line.startswith("data: "))
        return json.loads(data.removeprefix("data: "))["service"]

    def _get(self, path: str) -> httpx.Response:
        with self._http() as http:
            return http.get(self.url + path).raise_for_status()

    @contextmanager
    def _http(self) -> Iterator[httpx.Client]:
        verify = True if self.ca_file is None else ssl.create_default_context(cafile=self.ca_file)
        with self.host.entered(), httpx.Client(trust_env=False, timeout=240, verify=verify) as http:
            yield http
