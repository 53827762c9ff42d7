"""The benchmark tells when each stage was reached. tests/cluster/test_kubernetes.py starts its hosts' Ray by
the same command."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import coldstart


class Cluster:
    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def serve(self, application: Mapping[str, Any]) -> None:
        self.asked.append(("serve", application["args"]["draft"]))

    def client(self, host: str) -> Cluster:
        assert host == "the client's"
        return self

    def ask(self, request: Mapping[str, Any]) -> None:
        self.asked.append(("ask", request["max_tokens"]))


def test_coldstart_starts_the_demo_pair_and_asks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Cluster] = []

    @contextlib.contextmanager
    def switched(*names: str) -> Iterator[dict[str, str]]:
        yield {name: f"the {name}'s" for name in names}

    @contextlib.contextmanager
    def ray_cluster(head: str, pools: Mapping[str, str]) -> Iterator[Cluster]:
        assert (head, pools) == ("the head's", {"draft": "the draft's", "target": "the target's"})
        started.append(Cluster())
        yield started[-1]

    monkeypatch.setattr(coldstart, "missing", lambda: None)
    monkeypatch.setattr(coldstart, "switched", switched)
    monkeypatch.setattr(coldstart, "ray_cluster", ray_cluster)
    kept = tmp_path / "result.json"
    coldstart.main(runs=2, write=kept)
    result = json.loads(kept.read_text())
    draft = str(Path("demo/models/draft").resolve())
    assert [one.asked for one in started] == [[("serve", draft), ("ask", 16)]] * 2
    assert len(result["starts"]) == 2
    for stages in result["starts"]:
        assert list(stages) == ["cluster_up", "all_pools_serving", "first_answer"]
        assert list(stages.values()) == sorted(stages.values())
    assert result["seconds_until_first_answer"]["median"] >= result["seconds_until_cluster_up"]["median"]
