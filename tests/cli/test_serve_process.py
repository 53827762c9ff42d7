"""`outrider serve` as a process among processes: what a person at a terminal meets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

READY = "Outrider is ready: http://127.0.0.1:8000  (model some-model; gRPC 127.0.0.1:50051)"


def test_ctrl_c_stops_everything_and_is_no_error(serve: Callable[..., Any], notes: Any) -> None:
    service = serve()
    service.until_printed("Ctrl-C stops.")
    assert READY in service.output()
    os.killpg(service.process.pid, signal.SIGINT)  # what a terminal does: to the whole foreground group
    assert service.exit_code() == 0
    assert notes.none_left()
    assert len(notes.pids()) == 3
    assert notes.signals() == {"SIGTERM"}  # Ctrl-C itself reached the supervisor alone


def test_a_second_ctrl_c_does_not_wait(serve: Callable[..., Any], notes: Any, eventually: Any) -> None:
    service = serve(verifier="drains")
    service.until_printed("Ctrl-C stops.")
    os.killpg(service.process.pid, signal.SIGINT)
    service.until_printed("Ctrl-C again stops at once")
    eventually(lambda: notes.signals("verifier") == {"SIGTERM"}, "the verifier drains")
    os.killpg(service.process.pid, signal.SIGINT)
    assert service.exit_code() == 0
    assert notes.none_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_polite_signals_do_the_same(serve: Callable[..., Any], notes: Any, number: int) -> None:
    service = serve()
    service.until_printed("Ctrl-C stops.")
    service.process.send_signal(number)
    assert service.exit_code() == 0
    assert notes.none_left()


def test_ctrl_c_while_loading(serve: Callable[..., Any], notes: Any) -> None:
    service = serve(verifier="hangs")
    service.until_printed("verifier | loading")
    os.killpg(service.process.pid, signal.SIGINT)
    assert service.exit_code() == 0
    assert notes.none_left()
    assert "Outrider is ready" not in service.output()


def test_a_killed_supervisor_leaves_nothing(serve: Callable[..., Any], notes: Any, eventually: Any) -> None:
    service = serve(drafter="stubborn")
    service.until_printed("Ctrl-C stops.")
    service.process.kill()
    service.exit_code()
    eventually(notes.none_left, "every child's end")
    assert len(notes.pids()) == 3


@pytest.mark.parametrize("role", ["router", "verifier", "drafter"])
def test_a_child_that_dies_at_start_is_reported(serve: Callable[..., Any], notes: Any, role: str) -> None:
    service = serve(**{role: "refuses"})
    assert service.exit_code() == 1
    *_, last = service.output().splitlines()
    assert last == (
        f"outrider serve: {role} ended before it was ready: exit code 1: "
        f"outrider {role}: the checkpoint is damaged"
    )
    assert notes.none_left()
    assert "Traceback" not in service.output()


def test_a_worker_is_restarted_and_the_router_is_not(
    serve: Callable[..., Any], notes: Any, eventually: Any
) -> None:
    service = serve()
    service.until_printed("Ctrl-C stops.")
    os.kill(notes.pids("drafter")[0], signal.SIGKILL)
    eventually(lambda: len(notes.pids("drafter")) == 2, "a second drafter")
    service.until_printed("drafter died (killed by signal 9 (Killed)); restarting it in 0.5 s")
    os.kill(notes.pids("router")[0], signal.SIGKILL)
    assert service.exit_code() == 1
    assert service.output().splitlines()[-1] == "outrider serve: router died: killed by signal 9 (Killed)"
    assert notes.none_left()


def test_output_that_nobody_reads_any_more_stops_nothing(notes: Any, eventually: Any) -> None:
    command = [
        sys.executable,
        str(Path(__file__).with_name("fake_serve.py")),
        str(notes.path),
        *["serves"] * 3,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert any("Ctrl-C stops." in line for line in process.stdout)
        process.stdout.close()
        for generation in (2, 3):
            os.kill(notes.living("drafter"), signal.SIGKILL)
            eventually(lambda: len(notes.pids("drafter")) == generation, "another drafter")  # noqa: B023
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0
    assert notes.none_left()
