"""`outrider batch` answers each line once, also after a kill."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import InvalidRequest
from outrider_cli import batch
from outrider_cli.batch import answer_all, opened, read_requests

STATUS = {"bad": 400, "locked": 401, "page": 404}
ODD = {
    "page": b"<html>",
    "deep": b"[" * 100_000,
    "packed": gzip.compress(gzip.compress(bytes(2**28), 1)),  # of which a client unpacks nothing
}


class Server(ThreadingHTTPServer):
    """Answers each request with its own prompt, but for those that it was told to hold."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: Counter[str] = Counter()
        self.running = self.most = 0
        self.lock = threading.Lock()
        self.holds: set[str] = set()
        self.held = threading.Event()
        self.go_on = threading.Event()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt, server = body["prompt"], self.server
        with server.lock:
            server.asked[prompt] += 1
            first = server.asked[prompt] == 1
            server.running += 1
            server.most = max(server.most, server.running)
        if prompt in server.holds:
            server.held.set()
            server.go_on.wait()
        with server.lock:
            server.running -= 1
        status = STATUS.get(prompt, 429 if prompt == "busy" and first else 200)
        answer = ODD[prompt] if prompt in ODD else json.dumps({"text": prompt}).encode()
        self.send_response(status)
        if prompt == "packed":
            self.send_header("content-encoding", "gzip, gzip")
        self.send_header("retry-after", "0")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield serving
        serving.go_on.set()
        serving.shutdown()
        thread.join()


def line(id: str, prompt: str) -> str:
    told = {"custom_id": id, "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
    return json.dumps(told)


def start(server: Server, folder: Path, *more: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "outrider_cli", "batch", "--input-file", str(folder / "in.jsonl")]
    command += ["--output-file", str(folder / "out.jsonl"), *more]
    command += ["--url", f"http://127.0.0.1:{server.server_port}/v1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answers(folder: Path) -> dict[str, Any]:
    told = [json.loads(each) for each in (folder / "out.jsonl").read_text().splitlines()]
    assert len({each["custom_id"] for each in told}) == len(told), "a line was answered twice"
    return {each["custom_id"]: each["response"] for each in told}


def test_a_line_is_answered_once_also_after_a_kill(server: Server, tmp_path: Path) -> None:
    prompts = ["a", "bad", "busy", "slow", *(f"p{number}" for number in range(20))]
    lines = [line(f"id-{prompt}", prompt) for prompt in prompts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    server.holds.add("slow")
    killed = start(server, tmp_path, "--concurrency", "1")
    assert server.held.wait(60)
    killed.kill()
    killed.communicate()
    assert answers(tmp_path).keys() == {"id-a", "id-bad", "id-busy"}
    with (tmp_path / "out.jsonl").open("a") as output:
        output.write('{"id": "batch_req_", "custom_id": "id-p3", "resp')  # half a line
    server.go_on.set()
    told, error = start(server, tmp_path, "--concurrency", "3").communicate(timeout=60)
    assert told == "24 requests: 21 answered now, 3 before\n", error
    answered = answers(tmp_path)
    assert {id: each["body"]["text"] for id, each in answered.items()} == {
        f"id-{each}": each for each in prompts
    }
    assert answered["id-bad"]["status_code"] == 400 and answered["id-busy"]["status_code"] == 200
    assert server.asked == {**dict.fromkeys(prompts, 1), "busy": 2, "slow": 2}
    assert server.most <= 4  # three, and the one whose client was killed


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1 of {path} is not JSON"),
        ([line("a", "x"), line("a", "y")], "line 2 of {path} has the custom_id 'a' of an earlier line"),
        ([line("a", "x").replace("/v1/completions", "/v1/x")], "line 1 of {path} needs the method POST"),
        ([json.dumps({"url": "/v1/completions"})], "line 1 of {path} needs a custom_id"),
        (["[" * 100_000], "line 1 of {path} is not JSON"),
    ],
)
def test_a_file_that_is_wrong(server: Server, tmp_path: Path, lines: list[str], message: str) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines))
    process = start(server, tmp_path)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and message.format(path=path) in error and "Traceback" not in error
    assert not server.asked


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("locked", (), "refuses the key (401): see --api-key"),
        ("page", (), "answered 404 with what is no JSON: see --url"),
        ("deep", (), "answered 200 with what is no JSON: see --url"),
        ("packed", (), "answered 200 with what is no JSON: see --url"),
        ("a", ("--api-key", "\u00e9"), "--api-key must be ASCII text"),
        ("a", ("--api-key", "key\nkey"), "the API key holds characters that no key has"),
        ("a", ("--api-key", "key "), "the API key holds characters that no key has"),
        ("a", ("--url", "localhost:8000"), "--url must be http:// or https:// and a host"),
        ("a", ("--url", "http://a b/"), "--url must be http:// or https:// and a host"),
    ],
)
def test_what_is_the_answer_to_no_request_ends_it_with_a_sentence(
    server: Server, tmp_path: Path, prompt: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / "in.jsonl").write_text("\n".join(line(str(number), prompt) for number in range(9)))
    process = start(server, tmp_path, options=options)
    _, error = process.communicate(timeout=60)
    assert process.returncode != 0 and message in error and "Traceback" not in error
    assert not answers(tmp_path), "a line counts as answered"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (line("a", "x").replace('"x"', "NaN"), "has a number that is not finite"),
        (line("a\ud800", "x"), "has a custom_id that is no valid Unicode"),
        (line("a", "x" * 2**23), "has a body of"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{line('before', 'x')}\n{content}\n")
    with pytest.raises(InvalidRequest, match=f"line 2 of .* {message}"):
        read_requests(path)


@pytest.mark.parametrize("there", ["my notes, in one line", '{"custom_id": "a"}\n', line("a", "x") + "\n"])
def test_a_file_of_others_is_not_written_to(tmp_path: Path, there: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(there)
    with (
        pytest.raises(InvalidRequest, match="has lines that are no answers: name another file"),
        opened(path),
    ):
        pass
    assert path.read_text() == there


def test_two_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with opened(path), pytest.raises(InvalidRequest, match="written to by another"), opened(path):
        pass
    with opened(path):
        pass


async def test_who_says_nothing_is_asked_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "SILENT_SECONDS", 0.1)
    (tmp_path / "in.jsonl").write_text(line("id-slow", "slow"))
    server.holds.add("slow")
    requests = read_requests(tmp_path / "in.jsonl")
    with opened(tmp_path / "out.jsonl") as (output, _):
        url = f"http://127.0.0.1:{server.server_port}"
        answering = asyncio.create_task(answer_all(requests, output, url, 1, None))
        while server.asked["slow"] < 2:  # noqa: ASYNC110 (of threads)
            await asyncio.sleep(0.01)
        server.go_on.set()
        await answering
    assert answers(tmp_path).keys() == {"id-slow"}


def test_a_device_is_no_file() -> None:
    device = Path("/dev/full")  # which gives zeros without end
    with pytest.raises(InvalidRequest, match="--input-file /dev/full is a device"):
        read_requests(device)
    with pytest.raises(InvalidRequest, match="--output-file /dev/full is no file"), opened(device):
        pass
