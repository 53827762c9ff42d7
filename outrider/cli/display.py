"""What `outrider serve` shows: plain lines, or on a terminal a spinner for each process that is starting."""

from __future__ import annotations

import contextlib

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

STYLES = {"router": "cyan", "verifier": "green", "drafter": "magenta"}


class PersistentConsole(Console):
    """A console that goes quiet when nobody reads it any more, where rich would end the process."""

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
        """Lines to be copied: printed as they are, never wrapped."""
        self._print(Text(text))

    def close(self) -> None:
        """Takes the spinners away."""
        self._progress.stop()
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        self._starting.clear()

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)
