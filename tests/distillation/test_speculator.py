"""`outrider distill --speculator` on the demo target: after a kill it goes on; what it made guesses better
than what it began as, and serves the target's own text."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from demo.pair import TARGET
from distillation.folder import Folder, State
from distillation.measuring import tokens_of_runs
from distillation.options import DistillOptions
from distillation.prompts import Prompt
from distillation.report import gains, lines
from distillation.run import HELD_OUT, distill
from distillation.speculator_learning import SpeculatorLearner, _ahead, _batches
from distillation.states import KeptStates
from distillation.texts import PLACE, STATE, Lesson, Text, add, load, load_lessons
from distillation.writing import write
from outrider.engine import draft_vocabulary
from outrider.engine.loading import load_engine, load_model
from outrider.errors import OutriderError, StartupError
from outrider.sampling.params import SamplingParams
from tests.in_process import Cluster

LENGTH, READINGS, VOCABULARY, SAVED = 24, 40, 512, 8
KILLED_AT = 13  # steps


class Killed(BaseException):
    """What ends a run at once: of what is on the disk nothing changes, as after SIGKILL."""


def told(out: Path, **others: Any) -> DistillOptions:
    prompts = out.parent / "prompts.jsonl"
    if not prompts.exists():
        asked = [{"prompt": f"def function_{index}(", "category": "code"} for index in range(3 * HELD_OUT)]
        prompts.write_text("\n".join(map(json.dumps, asked)))
    known = {
        "tokens": "600",
        "length": LENGTH,
        "readings": READINGS,
        "vocabulary": VOCABULARY,
        "prompts": str(prompts),
        "speculator": True,
    }
    return DistillOptions(target=str(TARGET), out=str(out), **(known | others))


def made_of(options: DistillOptions) -> dict[str, Any]:
    return distill(options, Console(file=io.StringIO()))


class Made:
    """A speculator that was made in two runs, the first of which was killed, and what they did."""

    def __init__(self, out: Path) -> None:
        self.out, self.steps = out, list[int]()
        step = SpeculatorLearner._step

        def counted(learner: SpeculatorLearner, some: Any) -> float:
            if self.steps == list(range(KILLED_AT)):
                self.steps.clear()
                raise Killed
            self.steps.append(learner.taken)
            return step(learner, some)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SpeculatorLearner, "_step", counted)
            patch.setattr(SpeculatorLearner, "saved_steps", SAVED)
            with pytest.raises(Killed):
                made_of(told(out))
            texts = out / "work" / "text-0.jsonl"
            self.written = texts.read_bytes()
            self.report = made_of(told(out))
        self.texts = texts.read_bytes()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("speculator") / "made")


@pytest.mark.timeout(600)
def test_after_a_kill_it_goes_on_with_the_text_and_the_steps_that_it_had(made: Made) -> None:
    assert made.texts == made.written
    assert made.steps == list(range(SAVED, made.report["training_steps"]))
    assert made.report["training_steps"] % READINGS == 0


def test_it_learned_to_guess_what_the_target_says(made: Made) -> None:
    before, after = (made.report[name]["by_temperature"] for name in ("untrained", "acceptance"))
    assert after.keys() == {"0", "0.7", "1"}
    for temperature, one in after.items():
        gained = (one["acceptance"] - before[temperature]["acceptance"]) * one["tokens"]
        assert gained > 20, f"at {temperature}: {gained} tokens more"
        assert list(one["tokens_per_step"]) == ["1", "2", "3"]
        assert one["tokens_per_step"]["3"] > one["tokens_per_step"]["1"] > 1
    assert made.report["vocabulary"] == VOCABULARY and 0.8 < made.report["in_vocabulary"] <= 1
    assert made.report["guess_ms"] > 0 < made.report["target_step_ms"]
    assert json.loads((made.out / "report.json").read_text()) == made.report
    said = "\n".join([*lines(made.report, "OUT"), *gains(made.report)])
    assert f"outrider serve --target {TARGET} --speculator OUT" in said
    assert said.count("times plain decoding at k = 3") == 3


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 36), (0.8, 6)])
async def test_the_text_is_the_same_with_its_guesses_and_without(
    made: Made, temperature: float, least: int
) -> None:
    asked = load(made.out / "work" / "heldout.jsonl", 384)[0]
    prompt, sampling = asked.ids[: asked.prompt], SamplingParams(temperature=temperature, seed=5)
    async with Cluster(TARGET) as cluster:
        plain = await cluster.ask(prompt, sampling, 64)
    async with Cluster(TARGET, speculator=made.out) as cluster:
        guessed = await cluster.ask(prompt, sampling, 64)
    assert guessed.tokens == plain.tokens
    assert guessed.accepted > least and guessed.steps < plain.steps


@pytest.mark.timeout(600)
def test_an_update_goes_on_from_the_speculator_with_new_text(made: Made) -> None:
    with pytest.raises(OutriderError, match="holds a finished speculator: --update goes on"):
        made_of(told(made.out))
    vocabulary = draft_vocabulary.read(made.out, 4096)
    report = made_of(told(made.out, update=True, tokens="100", readings=1, vocabulary=300))
    assert report["round"] == 1 and report["untrained"] == made.report["untrained"]
    for temperature, one in report["acceptance"]["by_temperature"].items():
        before = report["untrained"]["by_temperature"][temperature]
        assert (one["acceptance"] - before["acceptance"]) * one["tokens"] > 20
    found = draft_vocabulary.read(made.out, 4096)
    assert vocabulary is not None and found is not None and torch.equal(found, vocabulary)


def test_a_speculator_and_a_draft_are_told_apart(tmp_path: Path) -> None:
    for speculator, sentence in (
        (False, "holds a draft: leave out --speculator, or name another folder"),
        (True, "holds a speculator: say --speculator, or name another folder"),
    ):
        out = tmp_path / str(speculator)
        with Folder(out).alone():
            Folder(out).save_state(State("", [], speculator))
        with pytest.raises(OutriderError, match=sentence):
            made_of(told(out, speculator=not speculator))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"layers": 2}, "--layers is for a draft: leave it out with --speculator"),
        ({"slim": True}, "--slim is for a draft: leave it out with --speculator"),
        ({"update": True}, "--update needs a speculator in .* to go on from"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(OutriderError, match=sentence) as error:
        made_of(told(tmp_path / "out", **options))
    assert "\n" not in error.value.message


def test_a_text_is_read_more_often_by_a_speculator() -> None:
    draft, speculator = (DistillOptions(target="a", out="b", speculator=each) for each in (False, True))
    assert (draft.all_readings, speculator.all_readings) == (3, 8)


@pytest.mark.parametrize(("quantization", "off"), [(None, 0.002), ("int8", 0.15)])
def test_the_states_are_those_that_the_targets_own_output_layer_reads(
    quantization: str | None, off: float
) -> None:
    engine = load_engine(str(TARGET), kv_memory_bytes=2**22, quantization=quantization)
    prompts = [Prompt(tuple(range(300, 330))), Prompt((400, 401, 402))]
    lessons = list(write(engine, prompts, [0.0, 1.0], 8, 1, 2, KeptStates(engine.model)))
    model, _ = load_model(str(TARGET))
    given: list[torch.Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][0]))
    for text, _, states in lessons:
        with torch.no_grad():
            model(input_ids=torch.tensor([text.ids[:-1]]))
        wanted = given.pop()[text.prompt - 1 :]
        found = torch.from_numpy(states.astype(np.float32))
        assert found.shape == wanted.shape
        assert ((found - wanted).norm(dim=1) <= off * wanted.norm(dim=1)).all()


def lesson(written: int, seed: int = 0) -> Lesson:
    """One whose tokens, likely ids and states tell their places."""
    likely, states = np.zeros(written, PLACE), np.zeros((written, 4), STATE)
    likely["ids"][:] = np.arange(written)[:, None]
    states[:] = np.arange(written)[:, None]
    return Lesson(Text([7, 7, *range(written)], 2, 0.0, seed), likely, states)


def test_a_place_teaches_what_stands_ahead_of_it_in_the_text() -> None:
    lessons = [lesson(5), lesson(1), lesson(700)]
    batches = _batches(lessons, 3)
    places = sorted(
        (some.lesson.text.written, at) for each in batches for some in each for at in range(*some[1:])
    )
    assert places == [*((5, at) for at in range(4)), *((700, at) for at in range(699))]
    assert len(batches) == 2
    for some in (some for each in batches for some in each):
        tokens, known, likely = _ahead(some, 3)
        about = np.arange(some.first, some.end)[:, None] + np.arange(1, 4)
        assert np.array_equal(known, about < some.lesson.text.written)
        assert np.array_equal(tokens[known], about[known] - 1)
        assert np.array_equal(likely["ids"][known][:, 0], about[known])


def test_a_step_yields_the_guesses_up_to_the_first_wrong_one_and_a_token_more() -> None:
    row = [5, 4, 3, 2, 1, 0, 1, 0, 9]  # the last step is cut short by the end of the text
    assert tokens_of_runs([row], 3) == (4 + 2 + 2) / 3
    assert tokens_of_runs([row], 1) == 2.0
    assert tokens_of_runs([[]], 3) == 0.0


def test_what_a_kill_left_of_states_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "text-0.jsonl"
    add(file, [lesson(2, 1)])
    add(file, [lesson(3, 2)])
    os.truncate(file, len(file.read_bytes()) - 5)
    assert [text.seed for text in load(file, 4)] == [1]
    add(file, [lesson(4, 3)])
    found = load_lessons(file, load(file, 4), 4)
    assert [each.states[:, 0].tolist() for each in found] == [[0, 1], [0, 1, 2, 3]]
    os.truncate(file.with_suffix(".states"), 5)
    with pytest.raises(StartupError, match=r"text-0\.states is damaged: remove .*text-0\.jsonl"):
        load_lessons(file, load(file, 4), 4)
