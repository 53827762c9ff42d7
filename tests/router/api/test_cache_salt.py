"""Who shares cached prefixes and turns with whom: the salt and the tenant of a request, over both APIs."""

from __future__ import annotations

import itertools

import pytest

from outrider.v1 import generation_pb2
from router.api.cache_salt import SALT_BYTES, cache_salt, tenant
from router.metrics import Metrics
from tests.router.api.test_access import ALICE, BOB, Served, Stub, answering, metadata

PROMPT = "the fox"


def test_a_salt_is_its_owner_s_and_the_request_s_and_nobody_else_has_it() -> None:
    asked = [*itertools.product(("", "alice", "bob"), (None, "s", "t")), ("alices", None), ("alice", "s\0t")]
    salts = [cache_salt(*each) for each in asked]
    assert len(set(salts)) == len(salts)
    assert salts == [cache_salt(*each) for each in asked]
    assert cache_salt("", None) == b"" and {len(salt) for salt in salts} == {0, SALT_BYTES}


def test_each_owner_is_a_tenant_and_without_keys_there_is_one() -> None:
    assert len({tenant(owner) for owner in ("", "alice", "bob")}) == 3
    assert tenant("") == b""


async def salts(service: Served, name: str, given: str | None = None) -> set[bytes]:
    """Returns the salts of a request by HTTP, of a chat, and of one by gRPC."""
    runner = service.runner
    runner.requests.clear()
    asked = {} if given is None else {"cache_salt": given}
    assert (await service.post(name, prompt=[PROMPT, PROMPT], **asked)).status_code == 200
    request = generation_pb2.GenerateRequest(text=PROMPT, **asked)
    async for _ in Stub(service.channel).Generate(request, metadata=metadata(name)):
        pass
    assert len(runner.requests) == 3
    return {session.params.cache_salt for session in runner.requests}


@pytest.mark.parametrize("shared", [False, True])
async def test_each_key_s_owner_has_a_salt_of_its_own_unless_prefixes_are_shared(
    metrics: Metrics, shared: bool
) -> None:
    service = Served(answering(), lambda: (ALICE, BOB), metrics, lambda: 0.0, share_prefixes=shared)
    await service.server.start()
    try:
        alice, bob = "" if shared else "alice", "" if shared else "bob"
        assert await salts(service, "alice") == {cache_salt(alice, None)}
        assert await salts(service, "bob") == {cache_salt(bob, None)}
        assert await salts(service, "alice", "secret") == {cache_salt(alice, "secret")}
        assert await salts(service, "bob", "secret") == {cache_salt(bob, "secret")}
        assert {session.params.tenant for session in service.runner.requests} == {tenant("bob")}
    finally:
        await service.close()
