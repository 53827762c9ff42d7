"""What a session's share of a step asks the sampler for."""

from __future__ import annotations

import pytest

from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import TokenCounts
from outrider.wire.session import SessionParams
from verifier.nodes import NO_NODES, Nodes
from verifier.part import Part
from verifier.running import Running
from verifier.session import Session, SessionSpec


@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_a_row_is_needed_only_where_the_draft_before_it_is_drawn(penalty: float) -> None:
    params = SamplingParams(presence_penalty=penalty)
    spec = SessionSpec(b"s" * 16, SessionParams((1, 2, 3), params, 20), (), 100, b"")
    running = Running(Session(spec, 4), TokenCounts(spec.params.prompt) if penalty else None)
    rows = Part(running, 2, 1, Nodes.path([7, 8, 9], [1.0] * 3, {}), True).rows()
    assert [row.position for row in rows] == [3, 4, 5, 6]
    assert [row.after for row in rows] == [None, 7, 8, 9]
    assert [list(row.drafted) for row in rows] == ([[], [7], [7, 8], [7, 8, 9]] if penalty else [[]] * 4)
    assert Part(running, 0, 2, NO_NODES, False).rows() == []
