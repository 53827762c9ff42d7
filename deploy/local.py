"""`make cluster`: Ray on this machine with the application on it, until a signal; nothing is left behind.

python -m deploy.local [--host HOST] [--port PORT] [--grpc-port PORT] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from outrider.errors import StartupError
from outrider.options.model_id import checkpoint_name
from outrider.options.protection import check_reach
from router.banner import banner
from router.config import LOOPBACK, RouterConfig

if TYPE_CHECKING:
    from ray.serve.schema import ServeStatus

OnSignal = Callable[[int, FrameType | None], None]

APP = "outrider"
CPUS = 8  # at least; Ray only counts them
OBJECT_STORE_BYTES = 128 * 2**20  # nothing large is ever put there
START_SECONDS = 300.0  # that a part of the start may take, on a machine that has much else to do


def environment(folder: Path) -> dict[str, str]:
    """Returns what every process of Ray's reads when it starts, this one when it imports ray.

    Files go to the folder. Its path must be short: sockets may have about 100 characters in all.
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
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.5",  # nobody else needs to hear that it stops
        # How long Ray and Serve wait before they give a process up: on a busy machine it is only slow.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "100",  # three times in a row
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",  # three times in a row
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "100",
        "RAY_worker_register_timeout_seconds": "300",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # of this cluster alone
    }


def main(command_line: Sequence[str]) -> int:
    options = _parser().parse_args(command_line)
    folder = Path(tempfile.mkdtemp(prefix="outrider-", dir="/tmp"))
    for name, value in environment(folder).items():
        os.environ.setdefault(name, value)
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():  # it has been heard: the cluster is being taken down
            return
        stop.set()
        raise KeyboardInterrupt

    try:
        arguments = dict(_pair(argument) for argument in options.arguments)
        with _cluster(folder, options.host, options.port, options.grpc_port, arguments, on_signal) as text:
            print(text, flush=True)
            stop.wait()
    except StartupError as error:
        print(f"outrider cluster: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


@contextmanager
def _cluster(
    folder: Path, host: str, port: int, grpc_port: int, arguments: Mapping[str, str], on_signal: OnSignal
) -> Iterator[str]:
    """Starts everything; gives what to tell people. Raises StartupError."""
    try:
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.config import gRPCOptions
    except ModuleNotFoundError:
        raise StartupError("Ray is not installed: install outrider[ray], or use make cluster") from None

    from deploy.app import application, models
    from deploy.args import parse
    from deploy.ingress import API_KEYS, SERVICER_FUNCTIONS
    from outrider.engine.checkpoint import locate, look_over

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    told = parse(arguments)
    check_reach(host, None, None, told.insecure)
    target, draft, name = models(told)
    for model in filter(None, (target, draft)):
        look_over(locate(model))  # a worker would say the same, a minute later
    made = application(told, LOOPBACK)  # all of it is on this machine
    _check_free(host, port, "--port")
    _check_free(host, grpc_port, "--grpc-port")
    try:
        _heed_signals(on_signal)
        _say("starting Ray")
        try:
            ray.init(
                _node_ip_address=host,
                _temp_dir=str(folder),
                num_cpus=max(CPUS, os.cpu_count() or 1),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:  # Ray has no type for a node that is not there after its 30 seconds
            raise StartupError(f"Ray does not start: {_last_line(error)}") from None
        _heed_signals(on_signal)  # again: Ray has handlers of its own
        start_serve = partial(
            serve.start,
            http_options={"host": host, "port": port},
            grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=SERVICER_FUNCTIONS),
        )
        see_through(start_serve, lambda: _proxies_serve(serve.status()))
        _say("starting the application")
        see_through(
            partial(serve.run, made, name=APP, route_prefix="/"),
            lambda: _proxies_serve(serve.status()) and _application_runs(serve.status()),
        )
        yield banner(
            f"http://{host}:{port}",
            f"{host}:{grpc_port}",
            name or checkpoint_name(target),
            keyed=told.api_keys is not None or API_KEYS in os.environ,
        )
    except (RuntimeError, RayError, TimeoutError) as error:
        raise StartupError(f"the application does not start: {_last_line(error)}") from None
    finally:
        _say("stopping")
        with suppress(Exception):
            if ray.is_initialized():
                serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()


def see_through(
    step: Callable[[], object],
    is_done: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Has Serve do a step of the start, and sees whether it comes about where Serve itself stopped waiting.

    It waits a minute for its proxies, whatever its settings say, and no longer for one that was replaced. Its
    controller goes on with both. Raises StartupError.
    """
    from ray.exceptions import RayActorError

    try:
        step()
        return
    except (TimeoutError, RayActorError) as error:
        reason = _last_line(error)
    until = clock() + START_SECONDS
    while True:
        with suppress(TimeoutError, RayActorError):
            if is_done():
                return
        if clock() >= until:
            raise StartupError(f"Ray Serve is not ready after {START_SECONDS:.0f} seconds: {reason}")
        pause(0.2)


def _proxies_serve(status: ServeStatus) -> bool:
    return bool(status.proxies) and all(state == "HEALTHY" for state in status.proxies.values())


def _application_runs(status: ServeStatus) -> bool:
    """Raises StartupError if it never will."""
    application = status.applications[APP]
    if application.status == "DEPLOY_FAILED":
        raise StartupError(f"the application does not start: {application.message}")
    return application.status == "RUNNING"


def _heed_signals(on_signal: OnSignal) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)


def _check_free(host: str, port: int, flag: str) -> None:
    """Raises StartupError if a port is taken: Ray would go on trying."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        raise StartupError(f"cannot listen on {host}:{port}: choose another with {flag} or --host") from None


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _last_line(error: Exception) -> str:
    """Returns the last line, which says what went wrong: Ray's errors carry a trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def _say(what: str) -> None:
    print(f"outrider cluster: {what}", flush=True)


def _pair(argument: str) -> tuple[str, str]:
    key, equals, value = argument.partition("=")
    if not key or not equals:
        raise StartupError(f"arguments are KEY=VALUE, such as drafter.max_replicas=2, not {argument!r}")
    return key, value


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is no port: name one from 1 to 65535")
    return port


def _parser() -> argparse.ArgumentParser:
    usual = RouterConfig()
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description=__doc__.split(";")[0])
    parser.add_argument("--host", default=usual.host, help="address of this machine to use")
    parser.add_argument("--port", type=_port, default=usual.port, help="of the HTTP API")
    parser.add_argument("--grpc-port", type=_port, default=usual.grpc_port, help="of the gRPC API")
    parser.add_argument(
        "arguments", nargs="*", metavar="KEY=VALUE", help="arguments: see deploy/args.py and outrider/options"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
