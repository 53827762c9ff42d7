"""Logs as lines of text or of JSON, whoever writes them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from io import StringIO

import pytest
from rich.console import Console

from outrider.errors import StartupError
from outrider.log_record import keep_to_lines
from outrider.options.telemetry import Logging
from outrider.telemetry.logs import FIGURES, JsonFormatter, TextFormatter, tell
from outrider_cli.display import JsonDisplay
from tests.cluster.process import ROOT

PROGRAM = """
import logging, sys, warnings
from outrider.options.telemetry import Logging
from outrider.telemetry.logs import log_to_stderr, take_over
log_to_stderr(Logging("info", sys.argv[1]))
library = logging.getLogger("library")  # that writes by itself
library.addHandler(logging.StreamHandler())
library.propagate = False
take_over()
library.warning("as %s say", "others")
library.info("what was asked")
logging.getLogger("router.x").info("ours")
logging.getLogger("uvicorn.error").error("of a server")
warnings.warn("it is old\\nand long", DeprecationWarning)
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("verifier.x").exception("it failed")
"""


@pytest.fixture
def log() -> Iterator[tuple[logging.Logger, StringIO, logging.StreamHandler[StringIO]]]:
    before = logging.getLogRecordFactory()
    keep_to_lines()
    written = StringIO()
    handler, logger = logging.StreamHandler(written), logging.getLogger("outrider.told")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield logger, written, handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logging.setLogRecordFactory(before)


def test_figures_stand_beside_the_message(
    log: tuple[logging.Logger, StringIO, logging.StreamHandler[StringIO]],
) -> None:
    logger, written, handler = log
    handler.setFormatter(TextFormatter())
    tell(logger, logging.INFO, "request", {"status": 200, "key": None, "seconds": 0.5})
    assert written.getvalue().endswith(" INFO outrider.told: request status=200 seconds=0.5\n")
    written.truncate(0)
    written.seek(0)
    handler.setFormatter(JsonFormatter())
    tell(logger, logging.INFO, "request", {"status": 200, "key": None, "seconds": 0.5})
    logger.info("two\nlines of %s", "ünïcode")
    tell(logger, logging.DEBUG, "nothing", {})
    first, second = map(json.loads, written.getvalue().splitlines())
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "info",
        "logger": "outrider.told",
        "message": "request",
        "status": 200,
        "seconds": 0.5,
    }
    assert second["message"] == r"two\nlines of ünïcode"


@pytest.mark.parametrize("form", ["text", "json"])
def test_all_that_a_process_logs_has_the_same_form(form: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, form], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    lines = run.stderr.splitlines()
    if form == "text":
        told = [line for line in lines if line[:2] == "20"]
        assert [line.split(" ", 3)[2] for line in told] == ["WARNING", "INFO", "ERROR", "WARNING", "ERROR"]
        return
    told = [json.loads(line) for line in lines]  # every single one
    assert [one["logger"] for one in told] == [
        "library",
        "router.x",
        "uvicorn.error",
        "py.warnings",
        "verifier.x",
    ]
    assert told[0]["message"] == "as others say"
    assert told[-1]["exception"].splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(StartupError, match="--log-format must be one of text, json, not 'xml'"):
        Logging(log_format="xml")


def test_serve_puts_the_processes_names_into_their_lines() -> None:
    written = StringIO()
    display = JsonDisplay(Console(file=written, width=20))
    display.line("verifier-1", '{"level": "info", "message": "a [b]"}')
    display.line("verifier-1", "outrider verifier ready: 127.0.0.1:1 and more than a line of the console")
    display.line("router", "{broken")
    display.note("stopping")
    told = list(map(json.loads, written.getvalue().splitlines()))
    assert told[0] == {"process": "verifier-1", "level": "info", "message": "a [b]"}
    assert told[1]["message"].startswith("outrider verifier ready: 127.0.0.1:1 and")
    for one, (process, message) in zip(told[2:], [("router", "{broken"), ("serve", "stopping")], strict=True):
        assert (one["process"], one["message"], one["level"]) == (process, message, "info")
        assert datetime.fromisoformat(one["time"]).tzinfo is not None and one["logger"]


def test_a_value_with_blanks_adds_no_figures_to_a_line_of_text() -> None:
    record = logging.makeLogRecord(
        {"msg": "request", FIGURES: {"route": 'POST /x" status=200', "status": 404}}
    )
    assert TextFormatter().format(record).endswith(r' route="POST /x\" status=200" status=404')
