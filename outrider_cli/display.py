"""What `serve` and `bench` show while they run: plain lines, and on a terminal what moves."""

from __future__ import annotations

import contextlib
import json
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from outrider.telemetry.logs import utc

STYLES = {"router": "cyan", "verifier": "green", "drafter": "magenta"}


class PersistentConsole(Console):
    """A console that goes quiet when nobody reads it any more. rich alone would end the process then."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):
            super().on_broken_pipe()


class ServeDisplay:
    """A supervisor's Display on a console."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._width = len("verifier")
        self._starting: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.fields[name]} {task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def starting(self, name: str) -> None:
        if not self._starting:
            self._progress.start()
        self._starting[name] = self._progress.add_task("starting", total=1, name=name)
        if not self._console.is_terminal:
            self.note(f"starting {name}")

    def ready(self, name: str) -> None:
        task = self._starting.pop(name, None)
        if task is not None:
            self._progress.update(task, description="ready", completed=1)
        if not self._starting:
            self.close()

    def line(self, name: str, text: str) -> None:
        style = STYLES.get(name.partition("-")[0], "")
        self._print(Text.assemble((f"{name:>{self._width}} | ", style), text))

    def note(self, text: str) -> None:
        self._print(Text.assemble((f"{'outrider':>{self._width}} | ", "bold"), text))

    def block(self, text: str) -> None:
        """Prints lines to be copied as they are, never wrapped."""
        self._print(Text(text))

    def close(self) -> None:
        """Takes the spinners away."""
        self._progress.stop()
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._starting.clear()

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


def _said(text: str) -> dict[str, object]:
    return {"time": utc(time.time()), "level": "info", "logger": "outrider_cli", "message": text}


class JsonDisplay:
    """A supervisor's Display of JSON lines: those that children log, with their names, and their other words
    as such lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def starting(self, name: str) -> None:
        self.note(f"starting {name}")

    def ready(self, name: str) -> None:
        """Its own words say so."""

    def line(self, name: str, text: str) -> None:
        logged: object = None
        if text.startswith("{"):
            with contextlib.suppress(ValueError):
                logged = json.loads(text)
        self._print({"process": name, **(logged if isinstance(logged, dict) else _said(text))})

    def note(self, text: str) -> None:
        self._print({"process": "serve", **_said(text)})

    def block(self, text: str) -> None:
        self.note(text)

    def close(self) -> None:
        """There is nothing to take away."""

    def _print(self, told: dict[str, object]) -> None:
        """rich would take five times as long to find out that there is nothing to draw."""
        try:
            self._console.file.write(json.dumps(told, ensure_ascii=False) + "\n")
            self._console.file.flush()
        except BrokenPipeError:
            self._console.on_broken_pipe()


class BenchDisplay:
    """Where a benchmark is: a bar for each stage, on a terminal; a line for each otherwise."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[doing]}"),
            console=console,
            refresh_per_second=1,  # drawing costs time on the cores that are measured
            disable=not console.is_terminal,
        )

    def __enter__(self) -> BenchDisplay:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._finish()
        self._progress.stop()

    def stage(self, what: str, steps: int) -> None:
        self._finish()
        self._task = self._progress.add_task(what, total=steps, completed=-1, doing="")
        if not self._console.is_terminal:
            self._console.print(f"{what} ({steps})", highlight=False)

    def step(self, what: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=1, doing=what)

    def _finish(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, advance=1, doing="")
