"""A router of another release, or with another certificate, beside those that a worker serves."""

from __future__ import annotations

from pathlib import Path

from outrider.net.tls import Tls
from outrider.wire.hello import Role
from tests.certificates import Authority
from tests.router.conftest import ROUTER, Rig


async def test_a_worker_that_refuses_a_router_does_not_end_as_others_may_have_it(rig: Rig) -> None:
    """One router of another release in a service's store had ended all its workers."""
    worker = await rig.worker(Role.VERIFIER, "v")
    worker.refuses = "the peer speaks protocol version 5, this side 4"
    registration = worker.register(rig.address)
    assert await worker.states.get() == (None, f"the worker refuses the router: {worker.refuses}")
    assert not registration.done()
    worker.refuses = ""
    assert await worker.states.get() == (ROUTER.worker_id, "registered")


async def test_a_worker_with_a_certificate_is_told_why_its_router_does_not_reach_it(
    rig: Rig, tmp_path: Path
) -> None:
    rig.discovery._tls = Tls(Authority().write(tmp_path))
    worker = await rig.worker(Role.VERIFIER, "v")  # in the clear
    worker.register(rig.address)
    router, reason = await worker.states.get()
    assert router is None
    assert reason.startswith("the router does not reach the worker: ") and "speaks no TLS" in reason
