"""The cluster of `make cluster`: starts Ray and the application, and takes both down when it is told to.

Started by deploy/local.py, in a session of its own: python -m deploy.cluster FOLDER DESCRIPTOR [argument ...]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from deploy.leftovers import end_session
from deploy.loopback import HOST_VARIABLE, listeners, unasked
from outrider.errors import StartupError
from outrider.options.model_id import checkpoint_name
from outrider.options.protection import check_reach
from router.banner import banner
from router.config import LOOPBACK, RouterConfig

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview, ServeStatus

APP = "outrider"
CPUS = 8  # at least; Ray only counts them
OBJECT_STORE_BYTES = 128 * 2**20  # nothing large is ever put there
START_TRIES = 4  # of Ray itself
START_SECONDS = 300.0  # that a part of the start may take, on a machine that has much else to do


class Terminal:
    """What people read. What Ray and its libraries print goes to a log from here on."""

    def __init__(self, log: Path) -> None:
        self._out, self._err = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        warnings = logging.StreamHandler(self._err)  # of our own
        warnings.setFormatter(logging.Formatter("outrider cluster: %(message)s"))
        logging.getLogger("deploy").addHandler(warnings)

    def show(self, text: str) -> None:
        print(text, file=self._out)

    def say(self, what: str) -> None:
        self.show(f"outrider cluster: {what}")

    def fail(self, why: str) -> None:
        print(f"outrider cluster: {why}", file=self._err)


class Stop:
    """The wish that the cluster stops: raised once as KeyboardInterrupt in the main thread."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor's end is that wish, as a signal is."""
        self._event = threading.Event()
        self.handle_signals()
        threading.Thread(target=self._read, args=(descriptor,), daemon=True).start()

    def handle_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def wait(self) -> None:
        self._event.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._event.is_set():
            self._event.set()
            raise KeyboardInterrupt

    @staticmethod
    def _read(descriptor: int) -> None:
        while os.read(descriptor, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)


def main(command_line: Sequence[str]) -> int:
    folder, descriptor, *rest = command_line
    options = _parser().parse_intermixed_args(rest)
    terminal = Terminal(Path(folder, "driver.log"))
    try:
        stop = Stop(int(descriptor))
        arguments = dict(_pair(argument) for argument in options.arguments)
        with _cluster(
            folder, options.host, options.port, options.grpc_port, arguments, terminal, stop
        ) as text:
            terminal.show(text)
            stop.wait()
    except StartupError as error:
        terminal.fail(error.message)
        return 1
    except KeyboardInterrupt:
        pass
    except Exception as error:
        traceback.print_exc()
        terminal.fail(f"it failed, by a mistake of its own: {type(error).__name__}: {_last_line(error)}")
        return 1
    finally:
        _end_others()
        shutil.rmtree(folder, ignore_errors=True)
    return 0


@contextmanager
def _cluster(
    folder: str,
    host: str,
    port: int,
    grpc_port: int,
    arguments: Mapping[str, str],
    terminal: Terminal,
    stop: Stop,
) -> Iterator[str]:
    """Starts everything; gives what to tell people. Raises StartupError."""
    from deploy.args import models, parse
    from outrider.engine.checkpoint import locate, look_over

    told = parse(arguments)  # what is refused is refused at once: before Ray, whose import takes a while
    check_reach(host, None, None, told.insecure)
    _check_free(host, port, "--port")
    _check_free(host, grpc_port, "--grpc-port")
    target, draft, name = models(told)
    for model in filter(None, (target, draft)):
        look_over(locate(model))  # a worker would say the same, a minute later
    try:
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.config import gRPCOptions
    except ModuleNotFoundError:
        raise StartupError("Ray is not installed: install outrider[ray], or use make cluster") from None

    from deploy.app import application
    from deploy.ingress import API_KEYS, SERVICER_FUNCTIONS

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    made = application(told, LOOPBACK)  # all of it is on this machine
    try:
        terminal.say("starting Ray")
        os.environ[HOST_VARIABLE] = host
        start_ray = partial(
            ray.init,
            _temp_dir=folder,
            num_cpus=max(CPUS, os.cpu_count() or 1),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

        def give_up() -> None:
            ray.shutdown()
            _end_others()

        try_again(start_ray, give_up)
        stop.handle_signals()  # again: Ray has handlers of its own
        start_serve = partial(
            serve.start,
            http_options={"host": LOOPBACK, "port": port},  # HAProxy has the host: deploy/loopback.py
            grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=SERVICER_FUNCTIONS),
        )
        see_through(start_serve, lambda: proxies_serve(serve.status()))
        terminal.say("starting the application")
        try:
            see_through(
                partial(serve.run, made, name=APP, route_prefix="/"),
                lambda: proxies_serve(serve.status()) and _application_runs(serve.status()),
            )
        except RuntimeError:  # Serve says no more than which deployments failed
            _application_runs(serve.status())
            raise
        _check_reach(host, (port, grpc_port))
        yield banner(
            f"http://{host}:{port}",
            f"{host}:{grpc_port}",
            name or checkpoint_name(target),
            keyed=told.api_keys is not None or API_KEYS in os.environ,
        )
    except (RuntimeError, RayError, TimeoutError) as error:
        raise StartupError(f"the application does not start: {_last_line(error)}") from None
    finally:
        terminal.say("stopping")
        with suppress(Exception):
            if ray.is_initialized():
                _while_ray_lives(serve.shutdown)
        ray.shutdown()


def _while_ray_lives(step: Callable[[], object]) -> None:
    """Returns when a step is done, or never will be: a signal may have reached all processes at once."""
    raylets = [process for process in psutil.Process().children() if process.name() == "raylet"]
    thread = threading.Thread(target=step, daemon=True)
    thread.start()
    while thread.is_alive() and not psutil.wait_procs(raylets, timeout=0)[0]:
        thread.join(0.1)


def try_again(start: Callable[[], object], give_up: Callable[[], object]) -> None:
    """Starts Ray. It gives its node 30 seconds, whatever its settings; a busy machine gets more than one try.

    What is left of a try is to be ended by `give_up`. Raises StartupError.
    """
    for left in reversed(range(START_TRIES)):
        try:
            start()
            return
        except Exception as error:  # Ray has no type for a node that is not there in time
            if left == 0 or "timed out" not in str(error).lower():
                raise StartupError(f"Ray does not start: {_last_line(error)}") from None
        give_up()


def _end_others() -> None:
    """Ends what is left in this process' session, if it has one of its own."""
    if os.getsid(0) == os.getpid():
        end_session(os.getpid())


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


def proxies_serve(status: ServeStatus) -> bool:
    return bool(status.proxies) and all(state == "HEALTHY" for state in status.proxies.values())


def _application_runs(status: ServeStatus) -> bool:
    """Raises StartupError if it never will."""
    application = status.applications[APP]
    if application.status == "DEPLOY_FAILED":
        raise StartupError(failure(application))
    return application.status == "RUNNING"


def failure(application: ApplicationStatusOverview) -> str:
    """Returns why an application has not started: what its replicas said, else what Serve says."""
    failed = [
        f"the {name} does not start: {_cause(deployment.message)}"
        for name, deployment in application.deployments.items()
        if deployment.status == "DEPLOY_FAILED"
    ]
    return "; ".join(failed) or f"the application does not start: {application.message}"


def _cause(message: str) -> str:
    """Returns the sentence of an error of ours, of others' the last line, with its type."""
    return _last_line(message).removeprefix(f"{StartupError.__module__}.{StartupError.__name__}: ")


def _check_reach(host: str, ports: Sequence[int]) -> None:
    """Raises StartupError if more listens than was asked for."""
    found = unasked(listeners(psutil.Process()), socket.gethostbyname(host), ports)
    if found:
        more = ", ".join(f"{one.host}:{one.port} ({one.process})" for one in found)
        raise StartupError(f"other machines would reach more than {host}: {more}; use another version of Ray")


def _check_free(host: str, port: int, flag: str) -> None:
    """Raises StartupError if a port is taken: Ray would go on trying."""
    try:
        socket.create_server((host, port)).close()
    except OSError:
        raise StartupError(f"cannot listen on {host}:{port}: choose another with {flag} or --host") from None


def _last_line(error: Exception | str) -> str:
    """Returns the last line, which says what went wrong: Ray's errors carry a trace."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


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
    parser = argparse.ArgumentParser(
        prog="python -m deploy.local", description="Ray on this machine with the application on it."
    )
    parser.add_argument("--host", default=usual.host, help="address of this machine to use")
    parser.add_argument("--port", type=_port, default=usual.port, help="of the HTTP API")
    parser.add_argument("--grpc-port", type=_port, default=usual.grpc_port, help="of the gRPC API")
    parser.add_argument(
        "arguments", nargs="*", metavar="KEY=VALUE", help="arguments: see deploy/args.py and outrider/options"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
