"""For all tests."""

import os

# Tests start processes from a process that runs gRPC, which the service never does. Its fork handlers can
# abort such a child before it becomes another program. Read when grpc is imported, so set before that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
