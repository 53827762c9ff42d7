"""A process that holds one part of a divided model. The worker that leads it starts it:

python -m outrider.worker.follower PARENT_PID SPEC
"""

from __future__ import annotations

import json
import os
import signal
import sys

from outrider.worker.parent import die_with


def main(parent: str, spec: str) -> int:
    """Follows until the leader stops it, and returns the exit code. `parent`: process id of the worker that
    it ends with. `spec`: a FollowerSpec as JSON."""
    die_with(int(parent))  # before what takes long: until then it heeds nobody
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # sent to the whole group: the worker says when it is over
    threads = json.loads(spec)["options"]["threads"]
    if threads is not None:  # read when torch is imported
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)

    from outrider.errors import OutriderError, PeerLost, StartupError
    from outrider.worker.garbage import spared_imports

    with spared_imports():
        from outrider.telemetry.logs import log_to_stderr, take_over
        from outrider.worker.followers import AFTER_ANOTHER, FollowerSpec, follow

    told = FollowerSpec.from_json(spec)
    log_to_stderr(told.logging)
    take_over()
    try:
        follow(told)
    except StartupError:  # the worker has been told, and says it
        return 1
    except OutriderError as error:
        print(f"outrider follower: {error.message}", file=sys.stderr, flush=True)
        return AFTER_ANOTHER if isinstance(error, PeerLost) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
