"""`outrider generate` and the lines of the banner, each run as a process against the real HTTP API."""

from __future__ import annotations

import asyncio
import os
import pty
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import uvicorn

from outrider.client import Statistics
from outrider.errors import Unavailable
from router.api.http import create_app
from router.api.intake import Intake
from router.banner import banner, curl_line, python_line
from router.metrics import Metrics
from router.requests import GenerationRequest, SessionEvent
from tests.router.api import scripted

ROOT = Path(__file__).parents[2]
SAID = "the quick brown fox"


class Server:
    """The router's HTTP server over scripted sessions, on a thread."""

    def __init__(self, ends_badly: bool, said: str) -> None:
        tokenizer = scripted.byte_level()
        self.ids = tokenizer.encode(said, add_special_tokens=False).ids

        def script(request: GenerationRequest) -> Sequence[SessionEvent | Exception | None]:
            steps = scripted.steps(self.ids, width=2)
            return [steps[0], Unavailable("the verifier was lost")] if ends_badly else steps

        self.runner = scripted.ScriptedRunner(scripted.served(tokenizer, max_context=512), script)
        app = create_app(Intake(self.runner, lambda limit: 4711), Metrics())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def start() -> Iterator[Callable[[bool], Server]]:
    servers: list[Server] = []

    def make(ends_badly: bool = False, said: str = SAID) -> Server:
        servers.append(Server(ends_badly, said))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def server(start: Callable[[], Server]) -> Server:
    return start()


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=240)


def generate(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "outrider_cli", "generate", *arguments]
    return subprocess.run(command, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=240)


def test_text_on_stdout_and_statistics_on_stderr(server: Server) -> None:
    run = generate("the", "--url", server.url, "--max-tokens", "64")
    assert (run.returncode, run.stdout) == (0, SAID + "\n"), run.stderr
    (line,) = run.stderr.splitlines()
    count = len(server.ids)
    assert line.startswith(f"{count} tokens in ")
    assert "tokens/s, acceptance rate " in line
    assert "mean accepted length " in line
    assert line.endswith(f"seed {server.runner.requests[0].params.sampling.seed}")


def test_every_option_reaches_the_server(server: Server) -> None:
    options = ["--max-tokens", "9", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "5", "--seed", "3"]
    options += ["-k", "2", "--model", "demo", "--stop", "brown", "--stop", "zzz"]
    run = generate("-", "--url", server.url + "/", *options, stdin="the fox")
    assert (run.returncode, run.stdout) == (0, "the quick \n"), run.stderr
    (request,) = server.runner.requests
    sampling = request.params.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 3)
    assert (request.params.max_tokens, request.num_speculative_tokens) == (9, 2)
    assert run.stderr.strip().endswith("seed 3")


def test_chat_goes_through_the_template(server: Server) -> None:
    run = generate("hello", "--chat", "--url", server.url)
    assert (run.returncode, run.stdout) == (0, SAID + "\n"), run.stderr
    text = scripted.byte_level().decode(server.runner.requests[0].params.prompt, skip_special_tokens=False)
    assert text == "<s>user: hello\nassistant:"


def test_bad_input_is_answered_in_the_servers_words(server: Server) -> None:
    run = generate("the", "--url", server.url, "--temperature", "-3")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr.startswith("outrider generate: temperature must be in [0, 100], not -3")
    run = generate("the", "--url", server.url, "--model", "other")
    assert (run.returncode, run.stderr) == (1, "outrider generate: model 'other' is not served here\n")


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    run = generate("the", "--url", f"http://127.0.0.1:{port}")
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == (
        f"outrider generate: no server answers at http://127.0.0.1:{port}: "
        "start one with `outrider serve`, or name another by --url\n"
    )


@pytest.mark.parametrize(
    "url", ["localhost:1", "http://[", "nothing", "ftp://host", "http://host:99999", "http://a b"]
)
def test_an_address_that_is_none(url: str) -> None:
    run = generate("the", "--url", url)
    assert run.returncode == 1
    assert run.stderr == f"outrider generate: --url must be http:// or https:// and a host, not {url}\n"


def test_an_empty_prompt() -> None:
    run = generate("-", stdin="")
    assert (run.returncode, run.stderr) == (
        2,
        "outrider generate: the prompt is empty: give some text to continue\n",
    )


def test_an_answer_that_breaks_off(start: Callable[..., Server]) -> None:
    run = generate("the", "--url", start(True).url, "--patience", "0.3")
    assert run.returncode == 1
    assert run.stderr == "outrider generate: the verifier was lost\n"


def test_a_connection_that_breaks() -> None:
    """The status and a first piece, and then nothing more."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    event = b'data: {"choices": [{"text": "half"}]}\n\n'
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(head + f"{len(event):x}\r\n".encode() + event + b"\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        run = generate("the", "--url", url)
        thread.join()
    assert (run.returncode, run.stdout) == (1, "half")
    assert run.stderr == f"outrider generate: the connection to {url} broke before the answer was complete\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_line_works_when_pasted(server: Server) -> None:
    run = shell(curl_line(server.url, "demo"))
    assert f'"text":"{SAID}"' in run.stdout, run.stderr


def test_the_python_line_works_when_pasted(server: Server) -> None:
    run = shell(python_line(server.url, "demo"))
    assert run.stdout == SAID + "\n", run.stderr
    assert server.runner.requests[0].params.sampling.greedy


def test_the_banner_holds_both_lines_whole() -> None:
    text = banner("http://h:1", "h:2", "some'model")
    lines = [line.strip() for line in text.splitlines()]
    assert curl_line("http://h:1", "some'model") in lines
    assert python_line("http://h:1", "some'model") in lines
    asking = [line.strip() for line in banner("http://h:1", "h:2", "m", chat=True).splitlines()]
    assert {curl_line("http://h:1", "m", chat=True), python_line("http://h:1", "m", chat=True)} < set(asking)
    assert "Outrider is ready: http://h:1  (model some'model; gRPC h:2)" in lines
    assert "Ctrl-C stops." in lines
    told = "Open that address in a browser, or ask it:"
    assert told in banner("http://h:1", "h:2", "m", page=True) and told not in text


def test_statistics_without_drafts() -> None:
    assert str(Statistics(10, 2.0, None, None, 7)) == "10 tokens in 2.00 s, 5.0 tokens/s, no drafts, seed 7"


def test_a_terminal_is_told_nothing_but_text(start: Callable[..., Server]) -> None:
    """What a model repeats could name the window, move the cursor or fill the clipboard."""
    said = "é\t→\n\x1b]0;b\x07\r\x9b2J"
    server = start(said=said)
    piped = generate("the", "--url", server.url)
    assert piped.stdout == said.replace("\r", "\n") + "\n"  # all, as Python reads lines
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "outrider_cli", "generate", "the", "--url", server.url]
    subprocess.run(command, cwd=ROOT, stdout=theirs, stderr=subprocess.DEVNULL, timeout=240, check=True)
    os.close(theirs)
    shown = os.read(ours, 2**16).decode()
    os.close(ours)
    assert shown == "é\t→\r\n" + r"\x1b]0;b\x07\r\x9b2J" + "\r\n"
