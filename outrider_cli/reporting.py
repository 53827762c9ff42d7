"""How a command fails: one line on stderr and an exit code; a traceback only for what nobody expected."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from outrider.errors import OutriderError

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def fail(command: str, sentence: str, code: int = FAILED) -> NoReturn:
    """Ends the process with a line that names the command and says what to change."""
    print(f"outrider {command}: {sentence}", file=sys.stderr, flush=True)
    raise typer.Exit(code)


@contextmanager
def reported(command: str) -> Iterator[None]:
    """Turns an expected error, and Ctrl-C, into the end of the process."""
    try:
        yield
    except OutriderError as error:
        fail(command, error.message)
    except BrokenPipeError:
        raise
    except OSError as error:
        what = "" if error.filename is None else f"{error.filename}: "
        fail(command, f"the system refuses: {what}{error.strerror or error}")
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
