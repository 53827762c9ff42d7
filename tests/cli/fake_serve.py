"""`outrider serve` with stand-ins for the roles: fake_serve.py FOLDER and a behaviour for each role."""

import asyncio
import sys
from functools import partial
from pathlib import Path

import typer

from outrider_cli.display import PersistentConsole, ServeDisplay
from outrider_cli.serve import run
from outrider_cli.supervisor import ChildSpec
from router.banner import banner

FAKE = str(Path(__file__).with_name("fake_role.py"))


def child(role: str, folder: str, behaviour: str) -> ChildSpec:
    command = (sys.executable, FAKE, role, folder, behaviour)
    drain_seconds = 1000.0 if role == "verifier" else 0.0
    return ChildSpec(role, role, command, role != "router", drain_seconds)


def main(folder: str, router: str, verifier: str, drafter: str) -> None:
    announce = partial(banner, model="some-model")
    others = [child("verifier", folder, verifier), child("drafter", folder, drafter)]
    display = ServeDisplay(PersistentConsole())
    asyncio.run(run(child("router", folder, router), lambda address: others, announce, display))


if __name__ == "__main__":
    typer.run(main)
