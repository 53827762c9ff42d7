"""The simulation: what it counts is right where it can be told by hand, and the real controllers reach their
goals in one quick case of each kind. Virtual time and seeds: the same figures everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.controllers import Ours
from benchmarks.simulation.costs import CPU, H200, Costs
from benchmarks.simulation.policies import Fixed, Start
from benchmarks.simulation.traces import Book, Trace, make
from benchmarks.simulation.world import BEYOND, Policy, Result, World

ROOT = Path(__file__).resolve().parents[2]
STEADY = Costs("a step of 10 ms, a draft token of 1 ms", lambda *_: 10e-3, lambda _: 1e-3, 64)


def simulated(
    policy: Policy, book: Book, sessions: int, costs: Costs = H200, round_trip: float = 1e-3
) -> Result:
    return World(book, costs, sessions, round_trip, policy, seed=1).run()


def always(right: bool, answers: int) -> Book:
    length = 200 + BEYOND
    return Book.of([Trace(np.full(length, right), np.full(length, 0.9), 200)] * answers)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.simulation.world.STEP_NOISE", 0.0)


@pytest.mark.usefixtures("quiet")
def test_plain_decoding_commits_a_token_a_step() -> None:
    result = simulated(Fixed("plain", [0] * 8, Start.AT_ONCE), always(False, 8), 2, STEADY)
    assert result.goodput == pytest.approx(2 / 10e-3)
    assert result.drafted_per_token == result.verified_per_token == 0


@pytest.mark.usefixtures("quiet")
def test_drafts_that_are_always_right_commit_k_more_and_wrong_ones_nothing() -> None:
    right = simulated(Fixed("", [4] * 8, Start.AT_ONCE), always(True, 8), 2, STEADY)
    assert 0.95 * 5 * 2 / 10e-3 < right.goodput <= 5 * 2 / 10e-3  # less at the beginning of each answer
    wrong = simulated(Fixed("", [4] * 8, Start.AT_ONCE), always(False, 8), 2, STEADY)
    assert wrong.goodput == pytest.approx(2 / 10e-3)


@pytest.mark.usefixtures("quiet")
def test_lock_step_pays_for_the_way_and_for_the_drafts_in_every_step() -> None:
    result = simulated(Fixed("", [4] * 8, Start.ALL_DRAFTS), always(True, 8), 2, STEADY, round_trip=20e-3)
    step = 10e-3 + 20e-3 + 4e-3
    assert 0.9 * 5 * 2 / step < result.goodput <= 5 * 2 / step
    assert result.waited == pytest.approx(24 / 34, abs=0.05)


def test_rounds_are_counted_as_an_answer_takes_them() -> None:
    accepted = np.array([1, 1, 0, 1, 0, 0, 1, 1] + [0] * 8, bool)
    book = Book.of([Trace(accepted, np.full(16, 0.5), 8)])
    assert book.rounds(0).tolist() == [8]
    assert book.rounds(1).tolist() == [5]  # 0-1, 2, 3-4, 5, 6-7
    assert book.rounds(4).tolist() == [4]  # 0-2, 3-4, 5, 6-8


def test_the_same_seed_gives_the_same_figures() -> None:
    book = Book.of(make("mix", 12, 3, BEYOND))
    assert simulated(Ours("ours"), book, 4) == simulated(Ours("ours"), book, 4)


def test_where_acceptance_changes_in_mid_stream_ours_beats_every_k_for_all() -> None:
    book = Book.of(make("switching", 256, 1, BEYOND))
    fixed = [simulated(Fixed("", [k] * 256, Start.AT_ONCE), book, 128).goodput for k in (0, 1, 2, 3, 4)]
    ours = simulated(Ours("ours"), book, 128)
    assert max(fixed) == fixed[2] > fixed[0]
    assert ours.goodput > 1.05 * max(fixed)
    assert ours.messages_per_token < 0.05
    assert ours.error_of_calibration < 0.05


def test_trees_bring_much_where_tokens_are_cheap_and_are_paths_where_they_are_not() -> None:
    book = Book.of(make("chat", 6, 2, BEYOND))
    paths, trees = (simulated(Ours("", trees=trees), book, 1) for trees in (False, True))
    assert paths.price < 0.03 and trees.goodput > 1.1 * paths.goodput
    book = Book.of(make("chat", 32, 2, BEYOND))
    paths, trees = (simulated(Ours("", trees=trees), book, 16, CPU) for trees in (False, True))
    assert paths.price > 0.3 and trees.goodput > 0.985 * paths.goodput


@pytest.mark.parametrize("sessions", [4, 128])
def test_hostile_drafts_never_cost_what_plain_decoding_gives(sessions: int) -> None:
    answers = max(16, sessions * 3 // 2)
    book = Book.of(make("hostile", answers, 1, BEYOND))
    plain = simulated(Fixed("plain", [0] * answers, Start.AT_ONCE), book, sessions)
    assert simulated(Ours("ours"), book, sessions).goodput > 0.99 * plain.goodput


def test_the_routers_k_costs_nothing_beside_the_verifiers_choice() -> None:
    book = Book.of(make("mix", 64, 1, BEYOND))
    alone = simulated(Ours("", router=False), book, 32)
    both = simulated(Ours(""), book, 32)
    assert both.goodput > 0.99 * alone.goodput
    assert both.drafted_per_token <= alone.drafted_per_token


@pytest.mark.process
def test_the_command_keeps_table_and_plot(tmp_path: Path) -> None:
    options = {
        "--machine": "h200",
        "--batch": "16",
        "--kind": "code",
        "--answers": "2",
        "--write": str(tmp_path),
    }
    command = [sys.executable, "benchmarks/simulate.py", *(word for pair in options.items() for word in pair)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    kept = json.loads((tmp_path / "simulate.json").read_text())
    assert [cell["cell"]["round_trip_ms"] for cell in kept["cells"]] == [1.0, 20.0]
    assert kept["goals"][0]["worst"] > 1
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_machine_is_named(tmp_path: Path) -> None:
    command = ["benchmarks/simulate.py", "--machine", "abacus"]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 1
    assert ran.stderr.strip() == "'abacus' is not one of h200, cpu"
