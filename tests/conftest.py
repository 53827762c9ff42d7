"""For all tests."""

import gc
import os
import secrets
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Tests start processes from a process that runs gRPC, which the service never does. Its fork handlers can
# abort such a child before it becomes another program. Read when grpc is imported, so set before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Whoever speaks to a Ray of the tests needs this token. A process reads it once, when it first uses Ray.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# How long an example takes is the machine's affair: no test here fails for time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


# Importing torch and transformers makes a million objects that last: the collector need not look at them.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.enable()
    gc.freeze()


class Rooms(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Where several processes run tests, a room's tests stay together: what a room starts, it starts once."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0].rpartition("/")[0]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which a single process does without
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Rooms:
    return Rooms(config, log)
