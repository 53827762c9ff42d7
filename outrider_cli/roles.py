"""The commands that run one role each. `serve` starts these very commands."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from drafter.config import DrafterConfig
from outrider.errors import StartupError
from outrider.options.option import build
from outrider.options.telemetry import Logging, named_in
from outrider.telemetry.logs import log_to_stderr, take_over
from outrider.worker.garbage import spared_imports
from outrider_cli.commands import command
from outrider_cli.interrupts import ending_at_once
from outrider_cli.reporting import reported
from router.config import RouterConfig
from verifier.config import VerifierConfig

API_KEYS = "OUTRIDER_API_KEYS"  # of the environment: the lines of the file that --api-keys would name
SPINS = "2000"  # of a thread that waits for others of its step, before it gives its core to other programs
TOKEN = "OUTRIDER_TOKEN"  # of the environment: what --token would say
STORE = "OUTRIDER_STORE"  # of the environment: what --store would say, if nobody is to see its password


def _run(role: str, config: type, **given: Any) -> None:
    log_to_stderr(build(Logging, given))
    with reported(role):
        told: Any = build(config, with_environment(given))
        with ending_at_once():  # the service heeds signals as soon as there is something to end
            with spared_imports():
                service = import_module(f"{role}.service")  # heavy; torch reads how many threads it may have
            take_over()
            asyncio.run(service.serve(told))


def with_environment(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the values with those that the environment has for a role of these options."""
    added: dict[str, Any] = {"cache": _cache_folder()}
    if given.get("join") is not None and given["token"] is None and given["token_file"] is None:
        added["token"] = os.environ.get(TOKEN)
    if given.get("router") is None and given.get("join") is None:
        added["store"] = given["store"] or os.environ.get(STORE)
        if "router" in given and not added["store"]:  # a worker's
            raise StartupError("say with --router or with --store where to register: one of them, not both")
    if "threads" in given:
        added["threads"] = _claim_threads(given["threads"], given["tensor_parallel_size"])
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    added["from_environment"] = named_in(os.environ)
    if given.get("api_keys") is None:
        added["api_key_lines"] = os.environ.get(API_KEYS)
    return given | added


router = command(
    partial(_run, "router", RouterConfig),
    "router",
    "Run a router: it takes requests, gives them to workers, and streams the answers.",
    RouterConfig,
    Logging,
)
verifier = command(
    partial(_run, "verifier", VerifierConfig),
    "verifier",
    "Run a verifier: it runs the target model and registers with a router, or in the routers' store.",
    VerifierConfig,
    Logging,
)
drafter = command(
    partial(_run, "drafter", DrafterConfig),
    "drafter",
    "Run a drafter: it guesses, mostly by a draft model, and registers with a router or in their store.",
    DrafterConfig,
    Logging,
)


def _cache_folder() -> Path | None:
    """Returns where this user's programs keep what they can find out again; None = the user has no such
    place."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"
    except RuntimeError:
        return None


def _claim_threads(threads: int | None, processes: int = 1) -> int:
    """Returns the number of threads of each of so many processes, and makes it known to the libraries that
    read it when torch is imported."""
    count = threads or max(1, len(os.sched_getaffinity(0)) // processes)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)
    return count
