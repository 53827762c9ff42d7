"""`make cluster`: Ray on this machine with the application on it, until a signal; nothing is left behind.

python -m deploy.local [--host HOST] [--port PORT] [--grpc-port PORT] [KEY=VALUE ...]

The cluster has a session of its own (deploy/cluster.py): a signal to this process, or to all of its group,
reaches nothing of Ray's, which can then be taken down in order.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from deploy.leftovers import claimed_folder, end_session, remove_stale_folders
from deploy.loopback import HOOK, HOOK_VARIABLE
from router.config import LOOPBACK

FOLDERS = Path("/tmp")  # a short path: sockets may have about 100 characters in all
STOP_SECONDS = 40.0  # that the cluster may take to stop by itself: Serve gives its replicas 30

# What a busy machine asks for. Processes are only slow there: so much later Ray and Serve give them up. And
# they get as much of the cores as others' do: Ray's own niceness, 15, leaves a service next to nothing.
BUSY_MACHINE = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "100",  # three times in a row
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",  # three times in a row
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "100",
    "RAY_worker_register_timeout_seconds": "300",
}


def environment(folder: Path) -> dict[str, str]:
    """Returns what every process of Ray's reads when it starts, this one when it imports ray.

    Files go to the folder.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",  # docs/ray.md says why
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/a.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{folder}",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/state",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/m.sock",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(_free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(_free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(_free_port()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",  # nobody else needs to hear that it stops
        **BUSY_MACHINE,
        "RAY_prestart_worker_first_driver": "0",  # no process waits for tasks: Serve starts those it needs
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the node's address is 127.0.0.1
        HOOK_VARIABLE: HOOK,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this cluster alone
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def main(command_line: Sequence[str]) -> int:
    remove_stale_folders(FOLDERS)
    with claimed_folder(FOLDERS) as (folder, lock):
        cluster = [sys.executable, "-m", "deploy.cluster", str(folder)]
        return supervise(cluster, command_line, {**environment(folder), **os.environ}, lock)


def supervise(
    command: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str], lock: int
) -> int:
    """Runs a command in a session of its own until it ends, or a signal does; returns the exit code.

    Its first argument is a descriptor, at whose end it is to stop: of a pipe that closes when this process
    ends, however it ends. Then come the arguments. Nothing of its session is left.
    """

    def on_signal(number: int, frame: FrameType | None) -> None:
        for each in signals:  # it has been heard
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard, held = os.pipe()
    child = None
    try:
        for each in signals:
            signal.signal(each, on_signal)
        child = subprocess.Popen(
            [*command, str(heard), *arguments],
            env=environment,
            start_new_session=True,
            pass_fds=(heard, lock),  # the folder is in use as long as one of the two runs
        )
        os.write(lock, str(child.pid).encode())
        code = child.wait()
        if code < 0:
            print(f"outrider cluster: it was killed by signal {-code}", file=sys.stderr)
        return code if code >= 0 else 1
    except KeyboardInterrupt:
        os.close(held)
        if child is not None:
            _wait(child)
        return 0
    finally:
        if child is not None:
            end_session(child.pid)


def _wait(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        print(
            f"outrider cluster: it did not stop in {STOP_SECONDS:.0f} seconds and is killed", file=sys.stderr
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
