"""The folder of a draft or a speculator in the making: what a run has done, so that the same command goes on
after a kill."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from outrider.errors import StartupError

WORK = "work"
REPORT = "report.json"


@dataclass(slots=True)
class State:
    """What is known of a folder's runs. A round is the first training, or an update."""

    target: str  # fingerprint
    layers: list[int]  # of the target's, in the draft; none, if it is a speculator
    speculator: bool = False  # what is made, in a draft's place
    round: int = 0
    done: bool = False
    seconds: float = 0.0  # spent on this round
    untrained: dict[str, Any] = field(default_factory=dict)  # acceptance of the cut before it learned

    @property
    def kind(self) -> str:
        return "speculator" if self.speculator else "draft"


KINDS = {  # of what a state holds
    "target": (str,),
    "layers": (list,),
    "speculator": (bool,),
    "round": (int,),
    "done": (bool,),
    "seconds": (int, float),
    "untrained": (dict,),
}


class Folder:
    """A draft's folder; all that it writes is whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / WORK

    def state(self) -> State | None:
        """Returns what runs before left. Raises StartupError for a folder that holds something else."""
        file = self.work / "state.json"
        if not file.is_file():
            if self.path.exists() and (not self.path.is_dir() or any(map(self._other, self.path.iterdir()))):
                raise StartupError(f"--out {self.path} holds something else: name a new or an empty folder")
            return None
        try:
            state = State(**json.loads(file.read_bytes()))
            if not all(type(getattr(state, name)) in kinds for name, kinds in KINDS.items()):
                raise TypeError
            return state
        except (ValueError, TypeError, RecursionError):
            raise StartupError(f"{file} is damaged: name another folder, or remove this one") from None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Raises StartupError if another run is at work in it: both would write to the same texts."""
        self.work.mkdir(parents=True, exist_ok=True)
        held = os.open(self.work, os.O_RDONLY)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StartupError(
                    f"another `outrider distill` is at work in {self.path}: wait until it ends, or name "
                    "another folder"
                ) from None
            yield
        finally:
            os.close(held)

    def save_state(self, state: State) -> None:
        text = json.dumps(asdict(state), indent=2)
        _whole(self.work / "state.json", lambda file: file.write_text(text))

    def _other(self, entry: Path) -> bool:
        """Returns whether it is none of a run that has just begun."""
        return entry != self.work or not entry.is_dir() or any(entry.iterdir())

    def texts(self, round: int) -> Path:
        return self.work / f"text-{round}.jsonl"

    @property
    def heldout(self) -> Path:
        return self.work / "heldout.jsonl"

    def save_training(self, training: dict[str, Any]) -> None:
        _whole(self.work / "training.pt", lambda file: torch.save(training, file))

    def training(self) -> dict[str, Any] | None:
        """Raises StartupError if what was kept is damaged."""
        file = self.work / "training.pt"
        if not file.is_file():
            return None
        try:
            found: dict[str, Any] = torch.load(file, "cpu", weights_only=True)
        except (UnpicklingError, RuntimeError, ValueError, EOFError):
            raise StartupError(f"{file} is damaged: remove it, and training begins anew") from None
        return found

    def save_report(self, report: dict[str, Any]) -> None:
        text = json.dumps(report, indent=2) + "\n"
        _whole(self.path / REPORT, lambda file: file.write_text(text))


def _whole(file: Path, write: Callable[[Path], object]) -> None:
    """Writes a file beside, and puts it in its place once it is on the disk."""
    beside = file.with_suffix(".new")
    write(beside)
    with beside.open("rb") as written:
        os.fsync(written.fileno())
    beside.replace(file)
