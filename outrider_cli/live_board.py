"""What `outrider top` shows: the live service as a router told it last, and who came and went. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.client.live import Told
from outrider.errors import printable

MOST_NEWS = 5
LEFT_SECONDS = 20.0  # that a worker which has left is still shown
LONGEST_NAME = 28
BLOCKS = " ▁▂▃▄▅▆▇█"
NONE = "-"
WIDE = 120  # columns, from which on there is room for all
OF_VERIFIERS = (
    "verifier|+model|#running|#waiting|#KV|#step ms|+#tokens|+#price|#tokens/s|#undrafted|+drafts bring"
)
ROLES = ("verifiers", "drafters")
WHY_UNDRAFTED = {
    "unwanted": "not asked for",
    "rest": "they rest",
    "no_drafter": "no drafter",
    "none_chosen": "none fits or pays",
    "price": "their price",
}


class Board:
    """What has been told so far."""

    def __init__(self) -> None:
        self.told: Told | None = None
        self.news: deque[str] = deque(maxlen=MOST_NEWS)
        self.left: dict[str, tuple[str, float]] = {}  # workers: their role, and when they left
        self._steps: dict[str, tuple[float, int]] = {}  # by verifier: its last step's seconds and tokens

    def take(self, told: Told) -> None:
        """Takes in what the router tells now. A router that begins anew counts its seconds anew."""
        if self.told is not None and told["seconds"] < self.told["seconds"]:
            self.left.clear()
            self.news.append("the router is another one, or was started again")
        before, now = self._workers(self.told), self._workers(told)
        for worker, role in sorted(before.items() - now.items()):
            self.left[worker] = role, told["seconds"]
            self.news.append(f"{short(worker)} left")
        for worker, _ in sorted(now.items() - before.items()):
            self.left.pop(worker, None)
            if self.told is not None:
                self.news.append(f"{short(worker)} came")
        self.left = {
            worker: (role, at)
            for worker, (role, at) in self.left.items()
            if told["seconds"] - at < LEFT_SECONDS
        }
        for one in told["service"]["verifiers"]:
            if one["step_tokens"]:
                self._steps[one["id"]] = one["step_seconds"], one["step_tokens"]
        self._steps = {name: step for name, step in self._steps.items() if name in now}
        self.told = told

    def step(self, verifier: str) -> tuple[str, str]:
        """Returns its last step's milliseconds and tokens."""
        seconds, tokens = self._steps.get(verifier, (0.0, 0))
        return milliseconds(seconds), str(tokens) if tokens else NONE

    @staticmethod
    def _workers(told: Told | None) -> dict[str, str]:
        service = told["service"] if told else {}
        return {one["id"]: role for role in ROLES for one in service.get(role, ())}


def frame(board: Board, url: str, width: int, trouble: str | None = None) -> RenderableType:
    """Returns what is shown now, on so many columns; `trouble`: why nothing newer comes, if nothing does."""
    lines: list[RenderableType] = [_head(board.told, url)]
    if trouble is not None:
        lines.append(Text(printable(trouble, 200), style="bold red"))
    if board.told is not None:
        lines += _tables(board, board.told, width >= WIDE)
        if board.news:
            lines.append(Text(f"\ncame and went: {', '.join(reversed(board.news))}", style="dim"))
    return Group(*lines)


def _head(told: Told | None, url: str) -> Text:
    head = Text.assemble(("outrider top", "bold"), f"  {url}")
    if told is None:
        return head
    service = told["service"]
    counts = service["counts"]
    speed = sum(one["goodput"] for one in service["verifiers"] if one["running"])
    figures = [
        (counts["sessions"], "session"),
        (round(speed), "token/s"),
        (counts["verifiers"], "verifier"),
        (counts["drafters"], "drafter"),
    ]
    for count, what in figures:
        plural = what if count == 1 else "tokens/s" if what == "token/s" else f"{what}s"
        head.append_text(Text.assemble("   ", (str(count), "bold"), f" {plural}"))
    return head


def _tables(board: Board, told: Told, wide: bool) -> list[RenderableType]:
    service, sessions = told["service"], told["sessions"]
    tables: list[RenderableType] = [
        _table(
            OF_VERIFIERS,
            [_verifier(board, one) for one in service["verifiers"]] + _gone(board, "verifiers"),
            "no verifier is connected",
            wide,
        ),
        _table(
            "drafter|drafts with|#sessions|#token ms|#busy|#KV|#round trips ms",
            [_drafter(one) for one in service["drafters"]] + _gone(board, "drafters"),
            "no drafter is connected",
            wide,
        ),
        _table(
            "your session|at|drafted by|+why no drafts|#k|#window|#acceptance|#tokens",
            [_session(one) for one in sessions],
            "none at the moment",
            wide,
        ),
    ]
    if service["sources"]:
        tables.append(_table("guesses of|#verified|#kept|#share", map(_source, service["sources"]), "", wide))
    if service["positions"]:
        shares = [_share(one["accepted"], one["verified"]) for one in service["positions"]]
        bars = "".join(BLOCKS[round(share * (len(BLOCKS) - 1))] for share in shares)
        told_shares = " ".join(f"{share:.0%}" for share in shares[:8])
        tables.append(Text(f"\nkept by place in the draft: {bars}  {told_shares}"))
    return tables


def _verifier(board: Board, one: dict[str, Any]) -> list[str]:
    gain = f"{one['draft_gain']:.2f}x" if one["draft_gain"] else ""
    worth = " ".join(filter(None, ("rest" if one["drafts_rest"] else "", gain)))
    return [
        short(one["id"]) + (" (draining)" if one["draining"] else ""),
        short(one["model"]),
        str(one["running"]),
        str(one["waiting"]),
        f"{one['kv_usage']:.0%}",
        *board.step(one["id"]),
        f"{one['price']:.3f}",
        f"{one['goodput']:.1f}" if one["running"] else NONE,
        f"{one['starvation']:.0%}",
        worth or NONE,
    ]


def _drafter(one: dict[str, Any]) -> list[str]:
    trips = " ".join(milliseconds(trip["seconds"]) for trip in one["round_trips"])
    return [
        short(one["id"]),
        short(one["model"]) or "no model",
        str(one["sessions"]),
        milliseconds(one["token_seconds"]),
        f"{one['busy']:.0%}",
        f"{one['kv_usage']:.0%}",
        trips or NONE,
    ]


def _session(one: dict[str, Any]) -> list[str]:
    return [
        short(one["id"][:8]),
        short(one["verifier"]) or "waits",
        " ".join(map(short, one["drafters"])) or "nobody",
        WHY_UNDRAFTED.get(one["undrafted"], NONE),
        str(one["k"]),
        str(one["window"]),
        NONE if one["undrafted"] else f"{one['acceptance']:.0%}",
        str(one["tokens"]),
    ]


def _source(one: dict[str, Any]) -> list[str]:
    share = _share(one["accepted"], one["verified"])
    return [short(one["source"]), str(one["verified"]), str(one["accepted"]), f"{share:.0%}"]


def _gone(board: Board, role: str) -> list[list[str]]:
    return [[f"{short(worker)} has left"] for worker, (was, _) in board.left.items() if was == role]


def _table(columns: str, rows: Iterable[Sequence[str]], empty: str, wide: bool) -> RenderableType:
    """`columns`: their names; numbers have a #, and what needs a wide terminal a + before it."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold cyan", pad_edge=False)
    names = columns.split("|")
    shown = [wide or not name.startswith("+") for name in names]
    for name in (name.removeprefix("+") for name, kept in zip(names, shown, strict=True) if kept):
        justify: Literal["left", "right"] = "right" if name.startswith("#") else "left"
        table.add_column(name.removeprefix("#"), justify=justify, no_wrap=True)
    for row in rows:  # names are what workers say of themselves: no markup
        table.add_row(*(Text(cell) for cell, kept in zip(row, shown, strict=False) if kept))
    if not table.row_count:
        table.add_row(Text(empty, style="dim"))
    return Group(Text(), table)


def short(name: str) -> str:
    """Returns a name as far as there is room for it, of characters that only stand there."""
    said = printable(name, LONGEST_NAME * 4)
    return said if len(said) <= LONGEST_NAME else f"{said[:20]}…{said[-6:]}"


def milliseconds(seconds: float) -> str:
    if not seconds:
        return NONE
    return f"{1000 * seconds:.{2 if seconds < 0.01 else 1}f}"


def _share(part: int, whole: int) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole else 0.0
