"""For all tests."""

import os
import secrets

from hypothesis import HealthCheck, settings

# Tests start processes from a process that runs gRPC, which the service never does. Its fork handlers can
# abort such a child before it becomes another program. Read when grpc is imported, so set before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# Whoever speaks to a Ray of the tests needs this token. A process reads it once, when it first uses Ray.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

# How long an example takes is the machine's affair: no test here fails for time.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
