"""Network namespaces: made, entered and removed with iproute2's `ip`, named for the process that made
them."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "outrider"
FOLDER = Path("/var/run/netns")  # where `ip` keeps the names
CLONE_NEWNET = 0x40000000  # linux/sched.h

_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count(1)


def missing() -> str | None:
    """Why namespaces cannot be made here; None = they can."""
    if not hasattr(_libc, "setns"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "the command ip is missing: install iproute2"
    try:
        remove(add("trial"))
    except RuntimeError as error:
        return f"network namespaces cannot be made here: {error}"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return None


def ip(*arguments: str) -> str:
    """Runs `ip` and returns what it prints. Raises RuntimeError with its own words."""
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if ran.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


def add(name: str) -> str:
    """Makes a namespace of this process's own and returns its full name, which nothing had before."""
    full = f"{PREFIX}-{os.getpid()}-{_start(os.getpid())}-{next(_numbers)}-{name}"
    ip("netns", "add", full)
    try:
        ip("-n", full, "link", "set", "dev", "lo", "up")
    except BaseException:
        ip("netns", "delete", full)
        raise
    return full


def empty(full_name: str) -> None:
    """Kills whatever runs in the namespace."""
    while pids := ip("netns", "pids", full_name).split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def remove(full_name: str) -> None:
    """Removes the namespace, and kills whatever runs in it."""
    empty(full_name)
    ip("netns", "delete", full_name)


def remove_leftovers() -> None:
    """Removes the namespaces of processes that are over."""
    for path in sorted(FOLDER.glob(f"{PREFIX}-*-*-*")):
        pid, start = path.name.split("-")[1:3]
        if _start(int(pid)) != start:
            remove(path.name)


def _start(pid: int) -> str | None:
    """When the process started, in clock ticks since boot: with it, a pid is used only once. None = over."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # what precedes is the command, with any characters
    return fields[18] if state != "Z" else None


@contextlib.contextmanager
def entered(full_name: str) -> Iterator[None]:
    """This thread, and no other, is in the namespace meanwhile; a socket stays where it was made."""
    with Path("/proc/thread-self/ns/net").open() as here, (FOLDER / full_name).open() as there:
        _set(there.fileno())
        try:
            yield
        finally:
            _set(here.fileno())


def _set(descriptor: int) -> None:
    if _libc.setns(descriptor, CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
