"""For all tests."""

import asyncio
import gc
import os
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Tests start processes from a process that runs gRPC, which the service never does. Its fork handlers can
# abort such a child before it becomes another program. Read when grpc is imported, so set before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Several processes run tests side by side: with more threads each, torch's would spin while they wait.
# A test that needs more says so, and they spin as little as a worker's. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

# The processes of the tests import some twenty thousand lines of ours each: they are compiled once.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Whoever speaks to a Ray of the tests needs this token. A process reads it once, when it first uses Ray.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# How long an example takes is the machine's affair: no test here fails for time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


class Loop(asyncio.SelectorEventLoop):
    """An event loop that may be told by gRPC how a call ended after its own end.

    gRPC's poller is one for the process: of a call that a test cancels last, the next test's loop hears, and
    hands it on to the closed one. That was an error in the log of a test that had nothing to do with it. A
    service has one loop, for as long as it lives."""

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, **more: Any) -> Any:
        of_grpc = getattr(callback, "__name__", "") == "_handle_callback_wrapper"
        return None if of_grpc and self.is_closed() else super().call_soon_threadsafe(callback, *args, **more)


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], Loop]]:
    return {"usual": Loop}


# Importing torch and transformers makes a million objects that last: the collector need not look at them.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()
    gc.freeze()


def room(nodeid: str) -> str:
    """The folder that a test is in."""
    return nodeid.partition("::")[0].rpartition("/")[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a room has started for all its tests ends with the last of them, not with the whole run: a Ray
    that nobody asks takes a tenth of a core.

    And what the tests of a file leave for good (modules, classes, registries) is looked at no more. With each
    engine that is loaded comes a full round of the collector, which would take longer and longer."""
    if nextitem is None:
        return
    if room(item.nodeid) != room(nextitem.nodeid):
        item.session._setupstate.teardown_exact(None)
    if item.path != nextitem.path:
        gc.collect()
        gc.freeze()


# Rooms that start once what all their tests use, and would start it again in each process that runs some.
WHOLE = ("deploy/ray", "e2e", "cluster", "observability", "fuzz", "page", "clients")

# Rooms and files that take a minute or more, the longest first.
LONGEST = (
    "deploy/ray",
    "e2e",
    "cluster",
    "exact/test_tensor_parallel.py",
    "engine/test_architectures.py",
    "bench/test_bench.py",
    "engine/test_triton_attention.py",
    "distillation",
    "chaos",
    "exact",
    "engine",
)


class Units(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Where several processes run tests, those of a file stay together, or of a whole room if they share what
    it starts.

    The longest come first, and short ones fill up what is left: none is alone at the end for long."""

    def _split_scope(self, nodeid: str) -> str:
        folder = room(nodeid)
        return folder if folder.removeprefix("tests/") in WHOLE else nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=_place), last=False)
        super()._assign_work_unit(node)


def _place(unit: str) -> int:
    """Where a unit stands in the order in which they start."""
    rooms = [unit.removeprefix("tests/"), unit.removeprefix("tests/").rpartition("/")[0]]
    return min((LONGEST.index(each) for each in rooms if each in LONGEST), default=len(LONGEST))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which a single process does without
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Units:
    return Units(config, log)
