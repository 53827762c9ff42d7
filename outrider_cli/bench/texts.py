"""Checks that the same request gave the same text, whatever served it. Pure."""

from __future__ import annotations

from collections import defaultdict

from outrider_cli.bench.cells import Cell

Key = tuple[str, float, int]  # workload, temperature, prompt: with the prompt's seed, a request


class Texts:
    """All texts of a run, by request and by way of serving. Streams and line must not matter."""

    def __init__(self) -> None:
        self._texts: dict[Key, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))

    def add(self, cell: Cell, prompt: int, text: str) -> None:
        setting = cell.setting
        self._texts[setting.workload, setting.temperature, prompt][cell.way].add(text)

    def same(self, way: str, reference: str) -> tuple[int, int]:
        """Returns (requests whose every text by `way` is the one by `reference`, requests that both
        answered)."""
        both = [texts for texts in self._texts.values() if way in texts and reference in texts]
        alike = [texts for texts in both if len(texts[way] | texts[reference]) == 1]
        return len(alike), len(both)
