"""How many connections there are, and who loses its own if they are too many."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest

from router.connections import SILENT_SECONDS, Connections


@dataclass(eq=False)
class Peer:
    """A connection of nobody."""

    idle: bool = True
    dropped: bool = field(default=False)

    def waits(self) -> bool:
        return self.idle

    def drop(self) -> None:
        self.dropped = True


def test_who_opens_many_connections_loses_its_own() -> None:
    connections = Connections(most=4)
    many = [Peer(idle=False), Peer(), Peer()]
    for peer in many:
        connections.add("a", peer)
    others = [Peer(), Peer()]
    for peer in others:
        connections.add("b", peer)
    assert [peer.dropped for peer in (*many, *others)] == [False, True, False, False, False]
    connections.add("b", Peer())  # before the first is closed
    assert [peer.dropped for peer in (*many, *others)] == [False, True, False, True, False]
    connections.remove("a", many[1])  # which is known to have gone
    connections.remove("b", others[1])
    connections.add("b", another := Peer())
    assert not another.dropped


def test_if_all_are_busy_the_new_one_gives_way() -> None:
    connections = Connections(most=2)
    busy, new = [Peer(idle=False), Peer(idle=False)], Peer(idle=False)
    for peer in (*busy, new):
        connections.add("a", peer)
    assert [peer.dropped for peer in (*busy, new)] == [False, False, True]


def test_a_flood_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    connections = Connections(most=0, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            connections.add("a", Peer())
        assert len(caplog.records) == 1
        now = SILENT_SECONDS
        connections.add("a", Peer())
    assert "1000 that waited" in caplog.records[1].getMessage()
