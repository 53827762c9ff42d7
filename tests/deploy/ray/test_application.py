"""The application on a real Ray, in HAProxy mode, with the target divided between two processes."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.cluster import failure
from deploy.loopback import MOST_OF_ADDRESS, Listener, listeners, unasked
from outrider.errors import StartupError
from outrider.v1 import generation_pb2, generation_pb2_grpc
from outrider.wire.hello import Role
from tests.deploy.ray.conftest import DEMO, KV_MEMORY, LEAKS, Cluster, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.process, pytest.mark.timeout(600)]

MAX_SESSIONS = 6
PROMPT = "def fibonacci(n):\n"


@pytest.fixture(scope="module")
def application(cluster: Cluster) -> Cluster:
    cluster.serve(
        {
            **DEMO,
            "propose": "suffix",
            "seed": 7,
            "router.max_sessions": MAX_SESSIONS,
            "verifier": {
                "tensor_parallel_size": 2,
                "compare": False,  # drafts do not rest here, however busy this machine is
                "labels": {"pool": "any"},
                "drain_seconds": 1,
                "kv_memory": KV_MEMORY,
            },
            "drafter": {"labels": {"pool": "any"}, "cpus": 0.25, "kv_memory": KV_MEMORY},
        }
    )
    return cluster


@pytest.fixture
def stub(application: Cluster) -> Iterator[generation_pb2_grpc.GenerationStub]:
    with grpc.insecure_channel(application.grpc_address) as channel:
        yield generation_pb2_grpc.GenerationStub(channel)


def test_a_divided_target_gives_its_own_text(application: Cluster, expected: Callable[..., str]) -> None:
    greedy = application.complete(PROMPT, 48, temperature=0)
    assert greedy["choices"][0]["text"] == expected(PROMPT, 48, temperature=0.0)
    drawn = application.complete("import os\n", 48, temperature=0.8, seed=11)
    assert drawn["choices"][0]["text"] == expected("import os\n", 48, temperature=0.8, seed=11)


def test_a_text_that_repeats_itself_is_drafted_by_both(application: Cluster) -> None:
    """Which of them is tried first is drawn, and the model is there later than the look-up."""

    def drafted() -> bool:
        answer = application.complete("def f(n):\n    return n\n" * 4, 64, temperature=0)
        return len(answer["metrics"]["speculative_decoding"].get("drafters", ())) == 2

    wait_until(lambda: application.workers("drafter") == 2, "both drafters are there")
    wait_until(drafted, "both drafted for a session")


def test_drafts_take_part(application: Cluster) -> None:
    accepted = []

    def drafted() -> bool:
        answer = application.complete(PROMPT, 64, temperature=0)
        accepted.append(answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"])
        return accepted[-1] > 0

    wait_until(drafted, "a draft is accepted")


def test_grpc_is_served_by_the_same_application(
    stub: generation_pb2_grpc.GenerationStub, application: Cluster, expected: Callable[..., str]
) -> None:
    request = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
    events = list(stub.Generate(request))
    assert [events[0].WhichOneof("event"), events[-1].WhichOneof("event")] == ["started", "completed"]
    assert "".join(event.delta.text for event in events) == expected(PROMPT, 24, temperature=0.0)
    with grpc.insecure_channel(application.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == 1  # SERVING


def test_what_a_replica_that_does_not_start_says_is_what_people_are_told(application: Cluster) -> None:
    from ray import serve

    @serve.deployment
    class Reader:
        def __init__(self) -> None:
            raise StartupError("the weights in T lack b.weight, which A needs")

    with pytest.raises(RuntimeError, match="Failed to update the deployments"):
        serve.run(Reader.bind(), name="reader", route_prefix="/reader")
    told = failure(serve.status().applications["reader"])
    serve.delete("reader")
    assert told == "the Reader does not start: the weights in T lack b.weight, which A needs"


def test_nothing_of_it_is_reached_from_other_machines(application: Cluster) -> None:
    """HAProxy, its statistics, Serve's proxies and replicas, the workers, and Ray itself."""
    found: set[Listener] = set()

    def all_are_seen() -> bool:
        """HAProxy makes place for a new one of it whenever a replica comes or goes."""
        found.update(listeners(psutil.Process()))
        seen = {one.process for one in found} | {one.port for one in found}
        return {"haproxy", "raylet", "gcs_server", application.port, application.grpc_port} <= seen

    wait_until(all_are_seen, "everything is seen to listen")
    assert unasked(found, "127.0.0.1", ()) == []


def test_a_router_tells_prometheus_its_own_figures_at_a_port_of_its_own(application: Cluster) -> None:
    """The API's port may lead to any of several: docs/observability.md."""
    from ray.serve._private.constants import RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT as FIRST

    known = {application.port, application.grpc_port, application.dashboard_port}
    ports = {one.port for one in listeners(psutil.Process()) if FIRST <= one.port < FIRST + 100} - known
    told = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text for port in sorted(ports)]
    assert len([text for text in told if 'outrider_workers{role="verifier"} 1.0' in text]) == 1


def test_there_is_one_deployment_for_each_pool(application: Cluster) -> None:
    from ray import serve

    found = serve.status().applications["outrider"].deployments
    assert set(found) == {"Router", "Verifier", "Drafter", "Lookup", "Registry"}


def in_progress(application: Cluster) -> list[httpx.Response]:
    """Opens as many streams as the router takes; each has begun."""
    body = {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True}
    opened = []
    for _ in range(MAX_SESSIONS):
        request = application.http.build_request("POST", "/v1/completions", json=body)
        response = application.http.send(request, stream=True)
        assert response.status_code == 200
        opened.append(response)
    return opened


def http(application: Cluster, **body: Any) -> httpx.Response:
    return application.http.post("/v1/completions", json={"prompt": PROMPT, **body})


def test_refusals_are_our_own_and_say_nothing_of_our_insides(
    application: Cluster, stub: generation_pb2_grpc.GenerationStub
) -> None:
    def status(**fields: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Generate(generation_pb2.GenerateRequest(text=PROMPT, **fields)))
        return raised.value.code(), raised.value.details()

    streams = in_progress(application)
    overload, overload_status = http(application, max_tokens=4), status(max_tokens=4)
    for stream in streams:
        stream.close()
    wait_until(lambda: http(application, max_tokens=1).status_code == 200, "room for more")

    bad, unknown = http(application, temperature=-1), http(application, model="other")
    assert (overload.status_code, bad.status_code, unknown.status_code) == (429, 400, 404)
    assert int(overload.headers["retry-after"]) >= 1
    told = [response.json()["error"]["message"] for response in (overload, bad, unknown)]
    statuses = [overload_status, status(temperature=-1), status(model="other")]
    assert [code.name for code, _ in statuses] == ["RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "NOT_FOUND"]
    assert [message for message, other in zip(told, statuses, strict=True) if message != other[1]] == []
    headers = [str(response.headers) for response in (overload, bad, unknown)]
    assert [words for words in told + headers if LEAKS.search(words)] == []


def test_a_request_keeps_its_id(application: Cluster, stub: generation_pb2_grpc.GenerationStub) -> None:
    answer = application.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert set(answer.headers.get_list("x-request-id")) == {"mine"}
    call = stub.Generate(
        generation_pb2.GenerateRequest(text=PROMPT, max_tokens=1), metadata=[("x-request-id", "mine")]
    )
    assert list(call)
    assert dict(call.trailing_metadata())["x-request-id"] == "mine"


def test_who_opens_many_connections_takes_nobodys_place(application: Cluster) -> None:
    """HAProxy has 4,096 of all clients, and had waited for the rest of a head for an hour."""

    def is_shut(number: int, port: int, held: dict[int, socket.socket]) -> bool:
        try:
            if number not in held:
                held[number] = socket.create_connection(("127.0.0.1", port), 60, ("127.0.0.5", 0))
                held[number].setblocking(False)
            return held[number].recv(1) == b""
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def one_is_shut(port: int, held: dict[int, socket.socket]) -> bool:
        # One HAProxy that another has just replaced may take some, too.
        return any(is_shut(number, port, held) for number in range(2 * MOST_OF_ADDRESS + 1))

    for port in (application.port, application.grpc_port):
        held: dict[int, socket.socket] = {}
        wait_until(partial(one_is_shut, port, held), "one is shut")
        assert application.http.get("/health").text.startswith("ready")
        for each in held.values():
            each.close()


@pytest.mark.parametrize("protocol", ["foo", "h2c"])
def test_a_request_that_asks_for_another_protocol_keeps_its_body(application: Cluster, protocol: str) -> None:
    """It had been read as the next request of a connection that other clients have, too: they got its answer,
    and its sender theirs."""
    body = json.dumps({"model": "demo", "prompt": PROMPT, "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: {protocol}\r\n"
    inner = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 50 + b"\r\n\r\n"
    for path, sent, status in (("/v1/completions", body, b"200"), ("/v1/nothing", inner, b"404")):
        with socket.create_connection(("127.0.0.1", application.port), timeout=60) as client:
            asked = head.replace("/v1/completions", path) + f"content-length: {len(sent)}\r\n\r\n"
            client.sendall(asked.encode())
            time.sleep(0.05)  # so that the head has been looked at
            client.sendall(sent)
            assert client.recv(2**16).startswith(b"HTTP/1.1 " + status)
    answers = [application.http.get("/health").text for _ in range(20)]
    assert all(answer.startswith("ready") for answer in answers)


def test_a_client_that_leaves_ends_its_generation(application: Cluster) -> None:
    def running() -> float:
        metrics = application.http.get("/metrics").text
        return sum(
            float(value) for value in re.findall(r"^vllm:num_requests_running\S* (\S+)", metrics, re.M)
        )

    streams = in_progress(application)
    wait_until(lambda: running() == MAX_SESSIONS, "all run")
    for stream in streams:
        stream.close()
    wait_until(lambda: running() == 0, "none runs")


def test_a_generation_can_be_cancelled_by_its_id(
    application: Cluster, stub: generation_pb2_grpc.GenerationStub
) -> None:
    request = generation_pb2.GenerateRequest(text=PROMPT, max_tokens=900, ignore_eos=True)
    events = stub.Generate(request)
    started = next(events).started
    next(events)
    stub.Cancel(generation_pb2.CancelRequest(id=started.id))
    with pytest.raises(grpc.RpcError) as raised:
        list(events)
    assert raised.value.code() is grpc.StatusCode.CANCELLED
    with pytest.raises(grpc.RpcError) as raised:
        stub.Cancel(generation_pb2.CancelRequest(id="none of ours"))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def verifiers(application: Cluster) -> set[str]:
    """The ids of those that are registered."""
    records = application.records().values()
    return {one.info.identity.worker_id for one in records if one.info.identity.role is Role.VERIFIER}


def followers() -> set[psutil.Process]:
    started = psutil.Process().children(recursive=True)
    return {process for process in started if process.name().startswith("ray::Follower")}


def test_a_verifier_that_loses_a_follower_is_replaced_and_serves_again(
    application: Cluster, expected: Callable[..., str]
) -> None:
    (follower,) = followers()
    (former,) = verifiers(application)
    follower.kill()
    wait_until(lambda: len(verifiers(application) - {former}) == 1, "another verifier is registered")
    wait_until(lambda: former not in verifiers(application), "the former one is not any more")
    wait_until(lambda: http(application, max_tokens=1).status_code == 200, "a router has taken it in")
    answer = application.complete(PROMPT, 48, temperature=0)
    assert answer["choices"][0]["text"] == expected(PROMPT, 48, temperature=0.0)
    assert len(followers()) == 1 and follower not in followers()


def test_many_at_once_each_get_their_own_text(application: Cluster, expected: Callable[..., str]) -> None:
    with ThreadPoolExecutor(MAX_SESSIONS) as pool:
        prompts = [f"def f{index}(" for index in range(MAX_SESSIONS)]
        answers = list(pool.map(lambda prompt: application.complete(prompt, 24, temperature=0), prompts))
    texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [expected(prompt, 24, temperature=0.0) for prompt in prompts]


def test_a_streamed_answer_comes_in_pieces_that_make_the_text(
    application: Cluster, expected: Callable[..., str]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    with application.http.stream("POST", "/v1/completions", json=body) as response:
        lines = list(response.iter_lines())
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
    assert len(pieces) > 1
    assert "".join(pieces) == expected(PROMPT, 40, temperature=0.0)


def test_a_verifier_that_is_scaled_in_hands_over_what_it_works_on(
    application: Cluster, expected: Callable[..., str]
) -> None:
    application.resize("Verifier", 2)
    wait_until(lambda: application.workers("verifier") == 2, "both verifiers are taken in")
    (first, second) = verifiers(application)
    with ThreadPoolExecutor(MAX_SESSIONS) as pool:
        prompts = [f"class Shape{index}:\n" for index in range(MAX_SESSIONS)]
        answers = pool.map(lambda prompt: application.complete(prompt, 300, temperature=0), prompts)
        wait_until(lambda: {first, second} <= at_work(application), "both are at work")
        application.resize("Verifier", 1)
        wait_until(lambda: len(verifiers(application)) == 1, "one has left")
        texts = [answer["choices"][0]["text"] for answer in answers]
    assert texts == [expected(prompt, 300, temperature=0.0) for prompt in prompts]
    assert verifiers(application) < {first, second}, "the one that stays was not restarted"


def at_work(application: Cluster) -> set[str]:
    """The ids of verifiers that have sessions, as far as the router has heard."""
    metrics = application.http.get("/metrics").text
    return set(re.findall(r'^vllm:num_requests_running{engine="([^"]+)".*} [1-9]', metrics, re.MULTILINE))
