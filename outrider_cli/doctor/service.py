"""A running service, as one of its routers tells of it."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx

from outrider import __version__
from outrider.client.live import Told, live
from outrider.client.streamed import NO_ANSWER
from outrider.errors import InvalidRequest, OutriderError, Unauthenticated, printable
from outrider_cli.doctor.certificates import lasting
from outrider_cli.doctor.clock import clock_against
from outrider_cli.doctor.finding import Finding
from outrider_cli.live_board import LONGEST_NAME, milliseconds, short

DATES = 1.0  # seconds: as exact is the date of an answer
LATE_STEPS = 2.0  # steps of the target in which a draft's way is no longer hidden
SHORT_SECONDS = 0.01  # round trips that are well whatever a step takes


def service(
    http: httpx.Client,
    url: str,
    unix_time: Callable[[], float],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Finding]:
    """Asks the router at `url`. Both clocks give seconds."""
    try:
        with closing(live(http, url)) as moments:
            told = next(moments)
        begun = clock()
        ready = http.get(f"{url}/ready")
        taken = clock() - begun
        now = unix_time() - taken / 2
        version = printable(str(http.get(f"{url}/version").json()["version"]), LONGEST_NAME)
    except Unauthenticated as error:
        return [Finding("router", error.message, "give its key by --api-key or in $OUTRIDER_API_KEY")]
    except InvalidRequest as error:
        todo = "give a router's address in --url, and the authority of its certificate in --tls-ca"
        return [Finding("router", error.message, todo)]
    except OutriderError as error:
        return [Finding("router", error.message, "look whether it runs, and whether this machine reaches it")]
    except (httpx.TransportError, *NO_ANSWER, RecursionError) as error:
        what = f"{url} broke off ({type(error).__name__})"
        return [Finding("router", what, "look at the router's log")]
    return [
        _router(version, ready, taken),
        *_certificate(url, ready, now),
        *_clock(ready, now, taken),
        _workers(told),
        *round_trips(told),
    ]


def _router(version: str, ready: httpx.Response, taken: float) -> Finding:
    said = f"Outrider {version}, {milliseconds(taken)} ms away"
    if version != __version__:
        return Finding("router", f"{said}, and this is {__version__}", "install the same release everywhere")
    told = ready.content.decode(errors="replace")  # whatever charset it names, which may be any codec
    if "degraded" in told:
        return Finding("router", f"{said}, {told.strip()}", "look at its store: doctor --store URL")
    return Finding("router", said)


def _certificate(url: str, answer: httpx.Response, now: float) -> Iterator[Finding]:
    tls = answer.extensions["network_stream"].get_extra_info("ssl_object")
    if tls is not None:
        yield lasting(f"the certificate of {url}", tls.getpeercert(), now)


def _clock(answer: httpx.Response, now: float, taken: float) -> Iterator[Finding]:
    try:
        there = email.utils.parsedate_to_datetime(answer.headers["date"]).timestamp()
    except (KeyError, ValueError, OverflowError):  # a proxy may leave it out
        return
    yield clock_against("the router's", now, there + DATES / 2, taken + DATES)


def _workers(told: Told) -> Finding:
    count = told["service"]["counts"]
    if not count["verifiers"]:
        todo = "start one with `outrider verifier`, and look in its log whether it registers"
        return Finding("workers", "the router knows no verifier: nothing can be answered", todo)
    leaving = [short(one["id"]) for one in told["service"]["verifiers"] if one["draining"]]
    drafters = _number(count["drafters"], "drafter") if count["drafters"] else "no drafter: decoding is plain"
    said = f"{_number(count['verifiers'], 'verifier')}, {drafters}"
    return Finding("workers", f"{said}, about to leave: {', '.join(leaving)}" if leaving else said)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def round_trips(told: Told) -> list[Finding]:
    """Returns a line for each pair of workers that are too far apart, or one for all that are known."""
    steps = {one["id"]: one["step_seconds"] for one in told["service"]["verifiers"]}
    trips = [
        (trip["seconds"], one["id"], trip["verifier"])
        for one in told["service"]["drafters"]
        for trip in one["round_trips"]
    ]
    wrong = [_far(*trip, steps) for trip in trips if _is_far(trip[0], steps.get(trip[2], 0.0))]
    if wrong or not told["service"]["drafters"]:
        return wrong
    if not trips:
        return [Finding("round trips", "none is known yet: a drafter measures them while it drafts")]
    seconds, drafter, verifier = max(trips)
    said = f"{len(trips)} known, at most {milliseconds(seconds)} ms ({short(drafter)} to {short(verifier)})"
    return [Finding("round trips", said)]


def _is_far(seconds: float, step: float) -> bool:
    return seconds > max(SHORT_SECONDS, LATE_STEPS * step)


def _far(seconds: float, drafter: str, verifier: str, steps: dict[str, Any]) -> Finding:
    step = steps.get(verifier, 0.0)
    against = f", and a step of the target {milliseconds(step)} ms" if step else ""
    return Finding(
        "round trips",
        f"from {short(drafter)} to {short(verifier)} it takes {milliseconds(seconds)} ms{against}",
        "bring them nearer: `outrider plan --rtt-ms` tells what drafts gain so",
    )
