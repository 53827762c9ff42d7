"""The service with certificates and keys, as a user starts it; and what it leaves in logs."""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from tokenizers import Tokenizer

from demo import pair
from outrider.client import Client, Statistics
from outrider.errors import OutriderError, Unavailable
from outrider.net.tls import Tls, TlsFiles
from outrider.sampling.params import SamplingParams
from outrider.store.store import WorkerRecord
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.description import ModelInfo, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.worker.registration import RouterRegistrar
from router.api.keys import ApiKey, digest, new_key
from tests.certificates import Authority, flags, serial
from tests.cluster.process import Process
from tests.e2e.conftest import DRAFT, KV_MEMORY, TARGET, Alone, Eventually
from tests.redis_server import PASSWORD, QUOTED_PASSWORD, RedisServer

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

PROMPT = "def walk(folder):\n"


@contextmanager
def outrider(*arguments: str, **environment: str) -> Iterator[Process]:
    process = Process((sys.executable, "-m", "outrider_cli", *arguments), environment)
    try:
        yield process
    finally:
        process.kill()


@dataclass
class Protected:
    process: Process
    files: TlsFiles
    authority: Authority
    key: str
    url: str
    grpc_address: str
    workers_address: str

    def client(self, key: str | None = None, ca_file: Path | None = None) -> Client:
        return Client(
            self.url, api_key=key or self.key, ca_file=ca_file or self.files.ca, patience_seconds=0.0
        )

    def certificate(self) -> int:
        """Serial number of what the HTTP port shows now."""
        host, _, port = self.url.removeprefix("https://").rpartition(":")
        return serial(ssl.get_server_certificate((host, int(port))))


def request(max_tokens: int) -> dict[str, object]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}


def text(client: Client, max_tokens: int = 24) -> str:
    with client:
        pieces = client.stream("/v1/completions", request(max_tokens))
        return "".join(piece for piece in pieces if not isinstance(piece, Statistics))


@pytest.fixture(scope="module")
def expected(alone: Alone) -> Callable[[int], str]:
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))

    def of(count: int) -> str:
        tokens = alone.tokens(tokenizer.encode(PROMPT).ids, SamplingParams(temperature=0.0), count)
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    return of


@pytest.fixture(scope="module")
def protected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Protected]:
    folder = tmp_path_factory.mktemp("protected")
    authority = Authority()
    files, key = authority.write(folder), new_key()
    keys = folder / "keys"
    keys.write_text(ApiKey("alice", digest(key)).line)
    ports = ("--port", "0", "--grpc-port", "0", "--worker-port", "0")
    small = (
        "--target",
        pair.NAME,
        "--propose",
        "suffix",
        "--kv-memory",
        KV_MEMORY,
    )  # certificates know nothing of models
    with outrider("serve", *ports, *small, *flags(files), "--api-keys", str(keys)) as process:
        process.wait_for("Outrider is ready: https://", 240)
        line = process.wait_for("outrider router ready: ")
        found = re.search(r"(https://\S+) \(gRPC (\S+), workers (\S+)\)", line)
        assert found is not None, line
        yield Protected(process, files, authority, key, *found.groups())
        process.signal(signal.SIGINT)
        process.wait(120)


def test_whoever_has_key_and_authority_gets_the_targets_text(
    protected: Protected, expected: Callable[[int], str]
) -> None:
    assert text(protected.client()) == expected(24)


def test_nobody_else_gets_anything(protected: Protected, tmp_path: Path) -> None:
    stranger = Authority("stranger").write(tmp_path)
    with pytest.raises(OutriderError, match="the API key is not known here"):
        text(protected.client(key=new_key()))
    with pytest.raises(Unavailable, match="not signed by an authority that is trusted here"):
        text(protected.client(ca_file=stranger.ca))
    with pytest.raises(httpx.TransportError):
        httpx.get(protected.url.replace("https", "http") + "/health")
    trusting = ssl.create_default_context(cafile=protected.files.ca)
    answer = httpx.get(protected.url + "/v1/models", verify=trusting)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert httpx.get(protected.url + "/health", verify=trusting).status_code == 200


def test_grpc_clients_show_a_key_and_no_certificate(
    protected: Protected, expected: Callable[[int], str]
) -> None:
    asked = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=24, temperature=0.0, ignore_eos=True)
    credentials = grpc.ssl_channel_credentials(protected.authority.pem)
    with grpc.secure_channel(protected.grpc_address, credentials) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        metadata = (("authorization", f"Bearer {protected.key}"),)
        said = "".join(response.delta.text for response in stub.Generate(asked, metadata=metadata))
        assert said == expected(24)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Generate(asked))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def record(role: Role) -> WorkerRecord:
    identity = Identity(role, "intruder", 1, "weights", "tokens")
    model = ModelInfo("m", "weights", "Arch", 1, 2, 3, (4, 5), "cpu", "float32", True, 2)
    return WorkerRecord(WorkerInfo(identity, model, 6, 7), "127.0.0.1:1")


def test_workers_register_with_a_certificate_only(protected: Protected, tmp_path: Path) -> None:
    """And with one that names a role, in that role only."""

    async def beat(address: str, tls: Tls | None, role: Role) -> str:
        registrar = RouterRegistrar(address, tls)
        try:
            answer = await registrar.beat(record(role))
            return answer.refusal or "taken"
        except OutriderError as error:
            return error.message
        finally:
            with suppress(OutriderError):
                await registrar.leave(record(role).info.identity)
            await registrar.close()

    def said(tls: Tls | None, role: Role = Role.DRAFTER, address: str = protected.workers_address) -> str:
        return asyncio.run(asyncio.wait_for(beat(address, tls, role), 120))

    stranger = Tls(Authority("stranger").write(tmp_path / "stranger"))
    assert "shows is not good: " in said(stranger)
    assert "does not answer" in said(None)
    peer = Tls(protected.authority.write(tmp_path / "peer"))
    assert said(peer) == said(peer, Role.VERIFIER) == "taken"
    assert "does not answer" in said(peer, address=protected.grpc_address), "clients' port has no registry"
    drafter = Tls(protected.authority.write(tmp_path / "drafter", "127.0.0.1", "outrider:drafter"))
    assert said(drafter) == "taken"
    assert said(drafter, Role.VERIFIER) == "this is for a verifier; the caller's certificate is a drafter's"


def test_a_renewal_under_a_stream_breaks_nothing(
    protected: Protected, expected: Callable[[int], str], eventually: Eventually
) -> None:
    """The certificates of all processes: new connections show and accept the new ones."""
    before = protected.certificate()
    with protected.client() as client:
        pieces = client.stream("/v1/completions", request(160))
        said = [next(pieces)]
        cert, key = protected.authority.pair("127.0.0.1")
        protected.files.key.write_bytes(key)
        protected.files.cert.write_bytes(cert)
        eventually(lambda: protected.certificate() == serial(cert), "the new certificate is shown")
        said += [piece for piece in pieces if not isinstance(piece, Statistics)]
    assert "".join(str(piece) for piece in said) == expected(160)
    assert protected.certificate() != before
    (child,) = [
        child
        for child in psutil.Process(protected.process.pid).children(recursive=True)
        if "drafter" in child.cmdline()
    ]
    taken_in = len([line for line in protected.process.said if "outrider drafter ready" in line])
    child.kill()  # its successor meets router and verifier with the new certificates
    eventually(
        lambda: len([line for line in protected.process.said if "outrider drafter ready" in line]) > taken_in,
        "a new drafter",
    )
    assert text(protected.client()) == expected(24)


def test_nothing_that_is_secret_or_anybodys_is_written_down(tmp_path: Path, eventually: Eventually) -> None:
    """Three roles and a Redis at the debug log level: requests that end well, are refused, are resumed."""
    marked, secret = f"# Zanzibar Quokka 7391\n{PROMPT}", new_key()
    keys = tmp_path / "keys"
    keys.write_text(ApiKey("alice", digest(secret)).line)
    debug = ("--log-level", "debug")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())

        def start(*arguments: str) -> Process:
            command = (sys.executable, "-m", "outrider_cli", *arguments, *debug)
            process = Process(
                ("env", *command), {"OUTRIDER_STORE": redis.url}
            )  # so its command line is its own
            stack.callback(process.kill)
            return process

        ports = ("--port", "0", "--grpc-port", "0")
        router = start("router", *ports, "--api-keys", str(keys))
        found = re.search(r"(http://\S+) \(gRPC (\S+)\)", router.wait_for("outrider router ready: ", 120))
        assert found is not None
        url, grpc_address = found.groups()
        small = ("--threads", "1", "--kv-memory", KV_MEMORY)
        processes = [
            router,
            start("verifier", "--target", str(TARGET), "--name", "m", *small),
            start("drafter", "--draft", str(DRAFT), *small),
        ]
        for process, role in zip(processes, ("router", "verifier", "drafter"), strict=True):
            process.wait_for(f"outrider {role} ready: ", 240)
        http = stack.enter_context(
            httpx.Client(base_url=url, headers={"Authorization": f"Bearer {secret}"}, timeout=120)
        )
        body = {"prompt": marked, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
        answered = http.post("/v1/completions", json=body)
        assert answered.status_code == 200, answered.text
        output: str = answered.json()["choices"][0]["text"]
        streamed = http.post("/v1/completions", json={**body, "stream": True, "seed": 5, "temperature": 1})
        (first, *_) = [line[4:] for line in streamed.text.splitlines() if line.startswith("id: ")]
        assert http.get(f"/v1/sessions/{first.partition(':')[0]}/events?after=0").status_code == 200
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": marked}], "max_tokens": 4}
        http.post("/v1/chat/completions", json=chat)
        http.post("/v1/completions", json={**body, "top_p": marked})
        http.post("/v1/completions", content=marked.encode())
        http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {secret}x"})
        with grpc.insecure_channel(grpc_address) as channel:
            stub = generation_pb2_grpc.GenerationStub(channel)
            asked = generation_pb2.GenerateRequest(text=marked, max_tokens=8)
            list(stub.Generate(asked, metadata=(("authorization", f"Bearer {secret}"),)))
        processes[2].kill()  # who loses somebody may have more to say
        eventually(lambda: http.post("/v1/completions", json=body).text != "", "answers without a drafter")
        metrics = http.get("/metrics").text
        command_lines = " ".join(
            " ".join(child.cmdline()) for process in processes[:2] for child in [psutil.Process(process.pid)]
        )
        for process in reversed(processes[:2]):
            process.signal(signal.SIGTERM)
            process.wait(120)
        written = "\n".join([metrics, command_lines, *("".join(process.said) for process in processes)])
    assert 'outrider_key_requests_total{key="alice"}' in written
    assert len(output) > 48
    for name, forbidden in {
        "prompt": "Zanzibar",
        "prompt's end": "Quokka 7391",
        "output": output[:24],
        "output's end": output[-24:],
        "key": secret,
        "its beginning": secret[:20],
        "its hash": digest(secret).hex(),
        "store's password": PASSWORD,
        "as in the address": QUOTED_PASSWORD,
    }.items():
        assert forbidden not in written, f"the {name} was written down"


@pytest.mark.parametrize("role", ["verifier", "drafter"])
def test_a_wrong_password_is_told_before_a_model_is_loaded(role: str) -> None:
    model = ("--target", str(TARGET)) if role == "verifier" else ("--draft", str(DRAFT))
    with RedisServer() as redis:
        wrong = redis.url.replace(QUOTED_PASSWORD, "wrong-password")
        with outrider(role, *model, OUTRIDER_STORE=wrong) as process:
            line = process.wait_for(f"outrider {role}: ", 120)
            with pytest.raises(AssertionError, match="ended with 1"):
                process.wait(120)
    assert "password" in line
    assert "wrong-password" not in "".join(process.said)
    assert not [said for said in process.said if "loading" in said]
