"""Ctrl-C at any moment of a start: no trace, and the exit that shells know. Moments are events, not times."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INTERRUPTED = """
import importlib.abc
import os
import signal
import sys

MODULE, FUNCTION = sys.argv.pop(1).split(":")


def interrupt(*args, **kwargs):
    os.write(1, b"interrupted")
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # what Python does between two lines comes here at the latest
        pass


class AtImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == MODULE and not FUNCTION:
            interrupt()


sys.meta_path.insert(0, AtImport())
from outrider_cli import main

if FUNCTION:
    __import__(MODULE)
    setattr(sys.modules[MODULE], FUNCTION, interrupt)
main()
"""
ROUTER = ("router", "--port", "0", "--grpc-port", "0")


@pytest.mark.parametrize(
    "moment",
    [
        "typer:",  # the command line is imported
        "outrider_cli.roles:",
        "router.service:",  # the role is
        "grpc._cython:",
        "uvicorn.server:",
        "router.service:opened",  # it runs
        "router.service:bind",
    ],
)
def test_a_router_that_is_interrupted_as_it_starts_says_nothing(moment: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, moment, *ROUTER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert ended.stdout == "interrupted"
    assert ended.returncode in (-signal.SIGINT, 130)  # for which shells say 130, too
