"""What a cluster leaves if it is killed: processes of its session, and its folder. Both are cleared away."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

PREFIX = "outrider-"
LOCK = "lock"  # in the folder: held by its owners as long as they live, and has the number of their session
END_SECONDS = 10.0  # for the system to take down what was killed


@contextmanager
def claimed_folder(parent: Path) -> Iterator[tuple[Path, int]]:
    """Gives a new folder, with the descriptor of the lock by which others see that it is in use."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, lock
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_stale_folders(parent: Path) -> None:
    """Removes the folders whose owners are gone, and ends what is left of their sessions."""
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or in use
            if not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                _remove_if_stale(folder)


def _remove_if_stale(folder: Path) -> None:
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        session = os.read(lock, 20)
        if session.isdigit() and _speaks_of(int(session), folder):
            end_session(int(session))
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _speaks_of(session: int, folder: Path) -> bool:
    """Returns True if the session is the folder's, and no later one that was given the same number."""
    return any(f"{folder}/" in word for process in _members(session) for word in _words(process))


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
        return words
    except psutil.Error:
        return []


def end_session(session: int) -> None:
    """Kills all processes of a session but this one."""
    for _ in range(3):  # what is being started at this moment is there the next time
        members = _members(session)
        for process in members:
            with suppress(psutil.Error):
                process.kill()
        if not members:
            return
        psutil.wait_procs(members, timeout=END_SECONDS)


def _members(session: int) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _session_of(process.pid) == session]


def _session_of(pid: int) -> int | None:
    """Returns None for this process too, which ends by itself."""
    try:
        return os.getsid(pid) if pid != os.getpid() else None
    except OSError:
        return None
