"""A stand-in for a role's process: python fake_role.py ROLE FOLDER BEHAVIOUR.

Notes its pid, and the signals it gets, in FOLDER, so that tests see what became of it."""

import os
import signal
import sys
import time
from pathlib import Path

ROUTER_READY = "http://127.0.0.1:8000 (gRPC 127.0.0.1:50051)"


def main() -> None:
    role, folder, behaviour = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    (folder / f"{role}.{os.getpid()}.pid").touch()

    def note(number: int, _frame: object) -> None:
        (folder / f"{role}.{os.getpid()}.{signal.Signals(number).name}").touch()
        while behaviour == "drains" and not (folder / "drained").exists():
            time.sleep(0.02)
        if behaviour != "stubborn":
            sys.exit(0)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    print(f"loading {os.getpid()}")
    if behaviour == "refuses":
        print("a line before")
        print(f"outrider {role}: the checkpoint is damaged", file=sys.stderr)
        print("a line after")
        sys.exit(1)
    if behaviour == "hangs":
        time.sleep(600)
    print(f"outrider {role} ready: " + (ROUTER_READY if role == "router" else "127.0.0.1:1 (model m)"))
    if behaviour == "crashes":
        os._exit(3)
    while True:
        time.sleep(600)


main()
