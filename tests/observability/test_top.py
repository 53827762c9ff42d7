"""`outrider top`: what it shows, that it outlives its router, and how it leaves the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest
from rich.console import Console

from outrider.client.live import live
from outrider.errors import InvalidRequest
from outrider_cli.live_board import WHY_UNDRAFTED, Board, frame
from router.drafting import Undrafted
from tests.e2e.conftest import ROOT
from tests.e2e.two_routers import Role, free_port
from tests.observability.conftest import Service

PATIENCE_SECONDS = 120  # only a hang can reach it
STYLE = re.compile(r"\x1b\[[\d;]*m")
COMMAND = [sys.executable, "-m", "outrider_cli", "top"]
VERIFIER = {"id": "v1", "model": "demo", "running": 2, "waiting": 1, "kv_usage": 0.25, "step_seconds": 0.0123}
VERIFIER |= {"step_tokens": 9, "price": 0.125, "goodput": 321.0, "starvation": 0.5, "draining": False}
VERIFIER |= {"drafts_rest": True, "draft_gain": 1.5}
DRAFTER = {"id": "d1", "model": "", "sessions": 2, "token_seconds": 0.0015, "busy": 0.75, "kv_usage": 0.0}
DRAFTER |= {"round_trips": [{"verifier": "v1", "seconds": 0.0004}]}
SESSION = {"id": "a" * 32, "verifier": "v1", "drafters": ["d1"], "k": 4, "window": 12}
SESSION |= {"acceptance": 0.8, "undrafted": "", "tokens": 77}
TOLD: dict[str, Any] = {
    "seconds": 10.0,
    "service": {
        "counts": {"verifiers": 1, "drafters": 1, "sessions": 3},
        "verifiers": [VERIFIER],
        "drafters": [DRAFTER],
        "pairs": [],
        "sources": [{"source": "suffix", "verified": 8, "accepted": 6}],
        "positions": [{"verified": 4, "accepted": 4}, {"verified": 4, "accepted": 1}],
    },
    "sessions": [SESSION],
}


def shown(board: Board, trouble: str | None = None, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(frame(board, "http://r", width, trouble))
    return captured.get()


def later(seconds: float, **service: Any) -> dict[str, Any]:
    told = deepcopy(TOLD)
    told["seconds"] = seconds
    told["service"] |= service
    return told


def cells(text: str, first: str) -> list[str]:
    """The columns of the line that begins so."""
    (line,) = [line for line in text.splitlines() if line.startswith(first)]
    return re.split(r" {2,}", line.strip())


def test_a_frame_tells_what_the_router_tells() -> None:
    board = Board()
    board.take(TOLD)
    text = shown(board)
    assert "3 sessions   321 tokens/s   1 verifier   1 drafter" in text
    assert cells(text, "v1") == [
        *("v1", "demo", "2", "1", "25%", "12.3", "9", "0.125", "321.0", "50%", "rest 1.50x"),
    ]
    assert cells(text, "d1") == ["d1", "no model", "2", "1.50", "75%", "0%", "0.40"]
    assert cells(text, "aaaa") == ["aaaaaaaa", "v1", "d1", "-", "4", "12", "80%", "77"]
    assert cells(text, "suffix") == ["suffix", "8", "6", "75%"]
    assert "kept by place in the draft: █▂  100% 25%" in text
    assert "broke" in shown(board, "it broke off")
    narrow = shown(board, width=80)
    assert cells(narrow, "v1") == ["v1", "2", "1", "25%", "12.3", "321.0", "50%"]
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80


def test_why_a_session_has_no_drafts_is_told() -> None:
    assert {each.value for each in Undrafted} == WHY_UNDRAFTED.keys()
    for why, said in WHY_UNDRAFTED.items():
        board = Board()
        board.take({**TOLD, "sessions": [{**SESSION, "drafters": [], "undrafted": why}]})
        assert cells(shown(board), "aaaa") == ["aaaaaaaa", "v1", "nobody", said, "4", "12", "-", "77"]


def test_an_idle_verifier_keeps_its_last_step_and_shows_no_speed() -> None:
    board = Board()
    board.take(TOLD)
    idle = {**VERIFIER, "running": 0, "step_tokens": 0, "step_seconds": 0.0}
    board.take(later(11.0, verifiers=[idle]))
    assert cells(shown(board), "v1")[5:9] == ["12.3", "9", "0.125", "-"]


def test_who_came_and_went_is_told_for_a_while() -> None:
    board = Board()
    board.take(TOLD)
    board.take(later(11.0, drafters=[{**DRAFTER, "id": "d2"}]))
    assert cells(shown(board), "d1") == ["d1 has left"]
    assert "came and went: d2 came, d1 left" in shown(board)
    board.take(later(40.0, drafters=[], verifiers=[]))
    text = shown(board)
    assert "\nd1 " not in text and cells(text, "d2") == ["d2 has left"]
    board.take(later(1.0, drafters=[], verifiers=[]))
    text = shown(board)
    assert "no verifier is connected" in text and "no drafter is connected" in text
    assert "the router is another one" in text and "has left" not in text


def test_a_workers_name_cannot_change_the_terminal() -> None:
    board = Board()
    board.take(later(1.0, verifiers=[{**VERIFIER, "id": "[red]x\x1b[2J", "model": "m" * 90}]))
    text = shown(board)
    assert "\x1b" not in text and "[red]x\\x1b[2J" in text
    assert "m" * 20 + "…" + "m" * 6 + " " in text


def once(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200"}
    environment.pop("OUTRIDER_API_KEY", None)
    command = [*COMMAND, "--once", *options]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_a_service_at_work_in_one_frame(service: Service) -> None:
    with service.loaded():
        until = time.monotonic() + PATIENCE_SECONDS
        # Sessions may just have ended, a first step may be to come, a slow drafter may have been given up.
        while True:
            run = once("--url", service.url, "--api-key", service.key)
            assert run.returncode == 0, run.stderr
            own = run.stdout.partition("your session")[2].partition("guesses of")[0]
            verifier = cells(run.stdout, "verifier-")
            guessed = re.search(r"^draft +\d+", run.stdout, re.MULTILINE)
            there = "1 verifier   1 drafter" in run.stdout
            if there and "verifier-" in own and guessed and verifier[5] != "-":  # none is between two steps
                break
            assert time.monotonic() < until, run.stdout
    assert verifier[1] == "outrider-demo" and float(verifier[5]) > 0
    assert "kept by place in the draft" in run.stdout


def test_what_is_wrong_is_a_line(service: Service) -> None:
    refused = once("--url", service.url)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr.startswith("outrider top: this service asks for an API key")
    nobody = once("--url", f"http://127.0.0.1:{free_port()}")
    assert nobody.returncode == 1 and "no server answers at" in nobody.stderr
    other = once("--url", f"{service.url}/v1", "--api-key", service.key)
    assert other.returncode == 1 and other.stderr.count("\n") == 1
    no_terminal = subprocess.run(COMMAND, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert no_terminal.returncode == 2 and "say --once" in no_terminal.stderr


class Terminal:
    """`outrider top` in a terminal of its own."""

    def __init__(self, *options: str) -> None:
        self.ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (50, 180))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.written = ""
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [*COMMAND, *options],
            cwd=ROOT,
            env={**environment, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        while data := os.read(self.ours, 65536):
            self.written += data.decode(errors="replace")

    @property
    def screen(self) -> str:
        """The last frame that is whole."""
        frames = self.written.split("\x1b[H")
        return STYLE.sub("", frames[-2]) if len(frames) > 2 else ""

    def wait_for(self, condition: Callable[[str], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition(self.screen):
            going = self.process.poll() is None and time.monotonic() < until
            assert going, f"never shown: {what}\n{self.written[-3000:]}"
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> int:
        """Returns the exit status, once all that it wrote is read."""
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_SECONDS)
        os.write(self.theirs, b"<all>")
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.written.endswith("<all>"):
            assert time.monotonic() < until
            time.sleep(0.01)
        return status


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    made: list[Terminal] = []

    def open(*options: str) -> Terminal:
        made.append(Terminal(*options))
        return made[-1]

    yield open
    for one in made:
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_terminal_is_as_it_was(
    service: Service, terminal: Callable[..., Terminal], number: signal.Signals
) -> None:
    top = terminal("--url", service.url, "--api-key", service.key)
    top.wait_for(lambda screen: "1 verifier" in screen, "the service")
    assert top.end(number) == 0
    assert termios.tcgetattr(top.theirs) == top.before
    last = {
        mode: top.written.rfind(mode) for mode in ("\x1b[?1049h", "\x1b[?1049l", "\x1b[?25l", "\x1b[?25h")
    }
    assert 0 <= last["\x1b[?1049h"] < last["\x1b[?1049l"], "the screen before is shown again"
    assert 0 <= last["\x1b[?25l"] < last["\x1b[?25h"], "and the cursor"
    assert "Traceback" not in top.written


def test_a_router_that_goes_and_comes(terminal: Callable[..., Terminal]) -> None:
    router = Role(("router", "--port", free_port(), "--grpc-port", "0"))
    url = f"http://127.0.0.1:{router.command[2]}"
    top = terminal("--url", url)
    try:
        top.wait_for(lambda screen: f"no server answers at {url}; trying again" in screen, "nobody there")
        for _ in range(2):
            router.start()
            router.wait()
            top.wait_for(
                lambda screen: "no verifier is connected" in screen and "trying again" not in screen,
                "the router",
            )
            router.end(signal.SIGKILL)
            top.wait_for(lambda screen: "trying again" in screen, "that it is gone")
    finally:
        router.process.kill()
        router.process.wait()
    assert top.end(signal.SIGINT) == 0


@pytest.mark.parametrize(
    "said",
    [
        {"service": {**TOLD["service"], "verifiers": [{**VERIFIER, "running": "\x1b[2J"}]}},
        {"service": {**TOLD["service"], "verifiers": [{**VERIFIER, "goodput": float("nan")}]}},
        {"service": {**TOLD["service"], "drafters": 5}},
        {"service": {"counts": {}}},
        {"sessions": [{**SESSION, "k": 10**400}]},
        {"sessions": [{**SESSION, "undrafted": ["\x1b[2J"]}]},
        {"seconds": "10"},
    ],
)
def test_what_is_no_live_service_is_told_in_a_sentence(said: dict[str, Any]) -> None:
    """Whatever a server says there: no error of ours, and nothing of it that a terminal obeys."""
    wire = f"data: {json.dumps(TOLD | said)}\n\n".encode()
    server = httpx.MockTransport(lambda _: httpx.Response(200, content=wire))
    with (
        httpx.Client(transport=server) as http,
        pytest.raises(InvalidRequest, match="no live service"),
    ):
        next(live(http, "http://r"))


def test_a_session_or_a_share_that_cannot_be_changes_nothing_in_the_terminal() -> None:
    board = Board()
    told = later(1.0, positions=[{"verified": 1, "accepted": 10**9}])
    board.take(told | {"sessions": [{**SESSION, "id": "\x1b[2J"}]})
    assert "\x1b" not in shown(board)
