"""`outrider serve`: the role commands on this machine under one supervisor."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from demo import pair, smollm2
from drafter.config import DrafterConfig
from outrider.net.tasks import first_of
from outrider.options.engine import AUTO, EngineOptions
from outrider.options.model_id import checkpoint_name
from outrider.options.option import build, option, same
from outrider.options.protection import Protection
from outrider.options.sessions import SessionOptions
from outrider.options.telemetry import Export, Logging
from outrider.options.worker import Listen
from outrider_cli.children import Models, Workers, router_child, threads_each, worker_children
from outrider_cli.commands import command
from outrider_cli.display import JsonDisplay, PersistentConsole, ServeDisplay
from outrider_cli.reporting import WRONG_USAGE, fail, reported
from outrider_cli.roles import API_KEYS, STORE
from outrider_cli.supervisor import ChildDied, ChildSpec, Supervisor
from router.banner import banner
from router.config import RouterConfig
from verifier.config import VerifierConfig


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `serve` is told. Each of its processes is told what it needs of it."""

    target: str | None = option(
        None,
        f"Folder, GGUF file or hub id of the target model; {pair.NAME} = the built-in pair.",
        shown=f"{smollm2.NAME} if it is installed, else the built-in pair",
    )
    draft: str | None = option(
        None,
        f"Folder, GGUF file or hub id of the draft model; {pair.NAME} = that of the built-in pair. With "
        "--propose each request has both.",
        shown="that of the built-in pair, if nothing else guesses",
    )
    served_model_name: str | None = same(VerifierConfig, "name")
    max_model_len: int | None = same(VerifierConfig, "max_model_len")
    propose: str | None = same(DrafterConfig, "propose")
    remember_answers: str | None = same(DrafterConfig, "remember_answers")
    drafters: int = option(1, "Number of draft workers; 0 = plain decoding.", least=0)
    verifiers: int = option(1, "Number of target workers.", least=1)
    host: str = same(RouterConfig, "host")
    port: int = same(RouterConfig, "port")
    grpc_port: int = same(RouterConfig, "grpc_port")
    sessions: SessionOptions = field(default=SessionOptions())
    engine: EngineOptions = field(default=EngineOptions())
    compare: bool = same(VerifierConfig, "compare")
    trees: bool = same(VerifierConfig, "trees")
    speculator: str | None = same(VerifierConfig, "speculator")
    draft_quantization: str | None = option(
        None,
        "The same for the draft model alone.",
        choices=("int8", "int4", "fp8"),
        shown="as --quantization",
        heading=EngineOptions.HEADING,
    )
    protection: Protection = field(default=Protection())
    api_keys: Path | None = same(RouterConfig, "api_keys")
    worker_port: int | None = same(RouterConfig, "worker_port")
    drafter_tokens: Path | None = same(RouterConfig, "drafter_tokens")
    record: Path | None = same(RouterConfig, "record")
    advertise: str | None = option(
        None,
        "Host by which drafters that join reach this machine.",
        metavar="HOST",
        shown="same as --host",
        heading=Listen.HEADING,
    )
    logging: Logging = field(default=Logging())
    export: Export = field(default=Export())


def _serve_command(**given: Any) -> None:
    os.environ.pop(STORE, None)  # of routers that share one: these processes keep to themselves
    with reported("serve"):
        told = build(ServeOptions, given)
        models = choose_models(told.target, told.draft, told.drafters, told.propose, told.speculator)
        models = replace(models, name=told.served_model_name or models.name)
        if told.remember_answers is not None and models.propose is None:
            fail("serve", "--remember-answers is for --propose suffix: leave it out", WRONG_USAGE)
        if told.draft_quantization is not None and models.draft is None:
            other = "--drafters 0" if told.drafters == 0 else "--propose"
            fail("serve", f"--draft-quantization is of no use with {other}: leave one out", WRONG_USAGE)
        if told.advertise is not None and told.drafter_tokens is None:
            fail("serve", "--advertise is of no use without --drafter-tokens: leave it out", WRONG_USAGE)
        router = router_child(models, build(RouterConfig, given), told.logging)
        others = partial(worker_children, models, _workers(told, models))
        others("127.0.0.1:1")  # what workers could not be told is said before anything starts
        asked = told.api_keys is not None or API_KEYS in os.environ
        announce = partial(
            banner,
            model=models.name.partition(",")[0].strip(),
            chat=models.chat,
            keyed=asked,
            ca=told.protection.tls_ca,
            page=told.sessions.page,
        )
        display = JsonDisplay if told.logging.log_format == "json" else ServeDisplay
        asyncio.run(run(router, others, announce, display(PersistentConsole())))


def _workers(told: ServeOptions, models: Models) -> Workers:
    cores, targets = len(os.sched_getaffinity(0)), told.verifiers * told.engine.tensor_parallel_size
    beside, alone = threads_each(cores, targets + told.drafters), threads_each(cores, targets)
    # Who looks guesses up takes no core.
    usual, other = (beside, alone) if models.draft is not None else (alone, beside)
    divides = told.engine.device == "cpu" and told.engine.tensor_parallel_size == 1
    compared = divides and told.compare and told.engine.threads is None and other != usual
    threads = told.engine.threads or usual
    engine = replace(told.engine, threads=threads, quantization=quantization(told.engine, models))
    return Workers(
        verifiers=told.verifiers,
        drafters=told.drafters,
        engine=engine,
        draft_quantization=told.draft_quantization,
        remember_answers=told.remember_answers,
        lock_step=told.sessions.lock_step,
        compare=told.compare,
        trees=told.trees,
        resting_threads=other if compared else None,
        max_model_len=told.max_model_len,
        protection=told.protection,
        joined=None if told.drafter_tokens is None else Listen(told.host, advertise=told.advertise),
        logging=told.logging,
        export=told.export,
    )


def quantization(told: EngineOptions, models: Models) -> str | None:
    """Returns how the target's layers run: as told, and the first model's on a CPU as fast as is exact."""
    ordinary = (told.device, told.number_format, told.tensor_parallel_size) == ("cpu", "float32", 1)
    return told.quantization or (AUTO if models.chat and ordinary else None)


serve = command(
    _serve_command,
    "serve",
    "Serve a model on this machine: a router, verifiers and drafters, each a process of its own.",
    ServeOptions,
)


def choose_models(
    target: str | None,
    draft: str | None,
    drafters: int,
    propose: str | None = None,
    speculator: str | None = None,
    command: str = "serve",
) -> Models:
    """Returns the pair to serve, or ends the process with a sentence if the options do not go together."""
    if draft is not None and drafters == 0:
        fail(command, "--draft names a model but --drafters 0 runs none: leave one of them out", WRONG_USAGE)
    if propose is not None and drafters == 0:
        fail(command, "--propose is of no use with --drafters 0: leave one out", WRONG_USAGE)
    if draft is not None and target is None:
        fail(command, "--draft is given without --target: name both models of the pair", WRONG_USAGE)
    if target == pair.NAME and draft in (None, pair.NAME):
        built_in = _built_in(drafters, propose or speculator, command, beside=draft is not None)
        return replace(built_in, propose=propose, speculator=speculator)
    if target is not None and (draft or propose or speculator) is None and drafters > 0:
        fail(
            command,
            "--target is given without --draft: name a draft model, or say --propose suffix"
            + (", or --drafters 0 for plain decoding" if command == "serve" else ""),
            WRONG_USAGE,
        )
    if target is not None:
        name = target if target == pair.NAME else checkpoint_name(target)
        found = _found(target, pair.TARGET, command)
        draft = None if draft is None else _found(draft, pair.DRAFT, command)
        return Models(found, draft, name, propose, speculator=speculator)
    if speculator is not None:
        fail(command, "--speculator is given without --target: name the target that it is of", WRONG_USAGE)
    weights = smollm2.weights()
    if weights is None:
        return _built_in(drafters, propose, command)
    guesses = propose or ("suffix" if drafters else None)
    return Models(str(weights), None, smollm2.NAME, guesses, chat=True)


def _built_in(drafters: int, propose: str | None, command: str, beside: bool = False) -> Models:
    """`beside`: its draft guesses, too, if something else is to propose."""
    target, draft = (_found(pair.NAME, each, command) for each in (pair.TARGET, pair.DRAFT))
    drafted = drafters > 0 and (propose is None or beside)
    return Models(target, draft if drafted else None, pair.NAME, propose)


def _found(model: str, built_in: Path, command: str) -> str:
    """Returns where a model is: `built_in`, if that is what is meant, else as it was told."""
    if model != pair.NAME:
        return model
    if not (built_in / "config.json").is_file():
        fail(
            command,
            f"the built-in pair is missing ({built_in}): name models of your own with --target and --draft",
        )
    return str(built_in)


async def run(
    router: ChildSpec,
    others: Callable[[str], list[ChildSpec]],
    announce: Callable[[str, str], str],
    display: ServeDisplay | JsonDisplay,
) -> None:
    """Runs a router and, once it is known where workers register, the others, until a signal. Leaves no
    process. `announce` makes what is said when all are ready, of the HTTP url and the gRPC host:port.

    A failure ends the process with one line and a non-zero code; a signal is the usual end and none. The
    children have their time to drain then, unless a second one comes."""
    supervisor = Supervisor(display)
    stopped = asyncio.Event()

    def on_signal() -> None:
        if stopped.is_set():
            supervisor.kill()
        stopped.set()

    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(sign, on_signal)
    failure = None
    try:
        serving = _serve(supervisor, display, router, others, announce)
        await first_of(serving, supervisor.failed(), stopped.wait())
        display.note("stopping; Ctrl-C again stops at once")
    except ChildDied as death:
        failure = str(death)
    finally:
        await supervisor.stop()
        display.close()
    if failure is not None:
        fail("serve", failure)


async def _serve(
    supervisor: Supervisor,
    display: ServeDisplay | JsonDisplay,
    router: ChildSpec,
    others: Callable[[str], list[ChildSpec]],
    announce: Callable[[str, str], str],
) -> None:
    """Starts everything, says that it is ready, and then waits for ever."""
    said = router_addresses(await supervisor.start(router))
    url, grpc_address, workers_address = (reachable(address) for address in said)
    await supervisor.start_all(others(workers_address))
    display.close()
    display.block(announce(url, grpc_address))
    await asyncio.Event().wait()


def router_addresses(announcement: str) -> tuple[str, str, str]:
    """Returns the HTTP url, the gRPC host:port and the one at which workers register, from what a router says
    when it is ready."""
    found = re.match(r"(https?://\S+) \(gRPC (\S+?)(?:, workers (\S+?))?\)", announcement)
    if found is None:
        raise ValueError(f"a router announced itself with {announcement!r}")
    return found[1], found[2], found[3] or found[2]


def reachable(address: str) -> str:
    """Returns the address for a client on this machine: a listener on every address is reached by
    loopback."""
    for everywhere, here in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")):
        address = re.sub(rf"^(https?://)?{re.escape(everywhere)}(?=:\d)", rf"\g<1>{here}", address)
    return address
