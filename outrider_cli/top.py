"""`outrider top`: the live service in a terminal, as the page's Live view has it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.errors import Unavailable
from outrider_cli.generate import DEFAULT_URL, ApiKey
from outrider_cli.reporting import WRONG_USAGE, fail, reported

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

AGAIN_SECONDS = 1.0
ASKED_WIDTH = 160  # columns of a frame that no terminal shows

CaFile = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="Authority (PEM) behind the certificate of an https address.",
        show_default="the public ones",
    ),
]


def top(
    url: Annotated[str, typer.Option(help="Address of a router's HTTP API.")] = DEFAULT_URL,
    api_key: ApiKey = None,
    ca_file: CaFile = None,
    once: Annotated[bool, typer.Option("--once", help="Print what is now, and end.")] = False,
) -> None:
    """Show verifiers, drafters and your sessions as they are at the moment; Ctrl-C ends it."""
    with reported("top"):
        from rich.console import Console

        from outrider.client.connection import http_client
        from outrider.client.live import SILENCE_SECONDS

        console = Console()
        if not once and not console.is_terminal:
            fail("top", "standard output is no terminal: say --once to print what is now", WRONG_USAGE)
        with http_client(api_key, ca_file, SILENCE_SECONDS) as http:
            if once:
                _print_once(http, url.rstrip("/"), console)
            else:
                _watch(http, url.rstrip("/"), console)


def _print_once(http: httpx.Client, url: str, console: Console) -> None:
    from outrider.client.live import live
    from outrider_cli.live_board import Board, frame

    board = Board()
    with closing(live(http, url)) as moments:
        board.take(next(moments))
    if not console.is_terminal:
        console.width = max(console.width, ASKED_WIDTH)
    console.print(frame(board, url, console.width))


def _watch(http: httpx.Client, url: str, console: Console) -> None:
    """Shows what comes until Ctrl-C. A router that goes is asked for until it is there again."""
    from rich.live import Live

    from outrider.client.live import live
    from outrider_cli.live_board import Board, frame

    board = Board()
    with (
        _ended_by_signals(),
        Live(frame(board, url, console.width), console=console, screen=True, auto_refresh=False) as shown,
    ):
        while True:
            try:
                for told in live(http, url):
                    board.take(told)
                    shown.update(frame(board, url, console.width), refresh=True)
            except Unavailable as trouble:
                why = f"{trouble.message}; trying again"
                shown.update(frame(board, url, console.width, why), refresh=True)
            time.sleep(AGAIN_SECONDS)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does: with the terminal as it was before."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
