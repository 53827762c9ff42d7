"""`outrider distill` on the demo target: killed twice, it goes on; its draft is accepted more often than the
cut that it began as, and serves the target's own text."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from transformers import AutoTokenizer

from demo.pair import TARGET
from distillation import prompts, run
from distillation.folder import Folder, State
from distillation.learning import SAVED_STEPS, TEXTS_A_STEP, Learner
from distillation.options import DistillOptions
from distillation.prompts import Prompt
from distillation.run import distill
from distillation.texts import KEPT, NO_STATES, PLACE, Lesson, Text, add, load, load_likely
from distillation.writing import write
from outrider.engine.loading import load_engine, load_model, load_tokenizer
from outrider.errors import OutriderError, StartupError
from outrider.sampling.params import SamplingParams
from router.prompt_record import PromptRecord
from tests.forked import parent
from tests.in_process import Cluster
from tests.tiny_models import build

TOKENS, LENGTH, READINGS, VOCABULARY = 1500, 32, 4, 1024
PATIENCE = 200


def told(out: Path, **others: Any) -> DistillOptions:
    known = {
        "tokens": str(TOKENS),
        "length": LENGTH,
        "readings": READINGS,
        "vocabulary": VOCABULARY,
        "layers": 2,
    }
    return DistillOptions(target=str(TARGET), out=str(out), **(known | others))


def killed(out: Path, when: Callable[[], bool]) -> None:
    """Runs the command until something is there, and ends it by SIGKILL then."""
    command = ["outrider_cli", "distill", f"--target={TARGET}", f"--out={out}"]
    sizes = [f"--tokens={TOKENS}", f"--length={LENGTH}", f"--readings={READINGS}"]
    shape = [f"--vocabulary={VOCABULARY}", "--layers=2"]
    process = parent().fork([*command, *sizes, *shape], os.environ, errors=True)
    try:
        deadline = time.monotonic() + PATIENCE
        while not when():
            assert process.poll() is None, "it ended before"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class Made:
    """A draft that was made in three runs, two of which were killed, and what they did."""

    def __init__(self, out: Path) -> None:
        self.out = out
        texts = out / "work" / "text-0.jsonl"
        killed(out, lambda: texts.is_file() and texts.stat().st_size > 0)
        with texts.open("a") as file:
            file.write('{"ids": [1, 2')  # as a kill may leave it
        self.first = texts.read_bytes().splitlines()[:-1]
        killed(out, (out / "work" / "training.pt").is_file)
        self.second = texts.read_bytes().splitlines()
        steps: list[int] = []
        step = Learner._step

        def counted(learner: Learner, some: Any) -> float:
            steps.append(learner.taken)
            return step(learner, some)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Learner, "_step", counted)
            self.report = distill(told(out), Console(file=io.StringIO()))
        self.steps = steps
        self.texts = texts.read_bytes().splitlines()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("distill") / "draft")


@pytest.mark.process
@pytest.mark.timeout(900)
def test_after_kills_it_goes_on_with_the_text_and_the_steps_that_it_had(made: Made) -> None:
    assert 0 < len(made.first) < len(made.second)
    assert made.second[: len(made.first)] == made.first, "text was written anew"
    assert made.texts == made.second
    assert all(json.loads(line)["ids"] for line in made.texts)
    total = -(-len(made.texts) // TEXTS_A_STEP) * READINGS
    assert made.steps == list(range(made.steps[0], total)) and made.steps[0] >= SAVED_STEPS
    assert made.report["training_steps"] == total


def test_it_learned_to_guess_what_the_target_says(made: Made) -> None:
    before, after = (made.report[name]["by_temperature"] for name in ("untrained", "acceptance"))
    assert after.keys() == {"0", "0.7", "1"}
    for temperature in after:
        gained = (after[temperature]["acceptance"] - before[temperature]["acceptance"]) * 12 * LENGTH
        assert gained > 10, f"at {temperature}: {gained} tokens more"
    assert made.report["vocabulary"] == VOCABULARY and 0.8 < made.report["in_vocabulary"] < 1
    assert json.loads((made.out / "report.json").read_text()) == made.report


@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_the_text_is_the_same_with_its_drafts_and_without(made: Made, temperature: float) -> None:
    assert load_tokenizer(made.out).hash == load_tokenizer(TARGET).hash
    prompt = list(range(300, 330))
    sampling = SamplingParams(temperature=temperature, seed=5)
    async with Cluster(TARGET) as cluster:
        plain = await cluster.ask(prompt, sampling, 64)
        drafter = await cluster.add_drafter(made.out)
        assert len(drafter.stepper._engine.vocabulary) == VOCABULARY
        drafted = await cluster.ask(prompt, sampling, 64)
    assert drafted.tokens == plain.tokens
    assert drafted.accepted > 5 and drafted.steps < plain.steps


@pytest.mark.timeout(900)
def test_an_update_goes_on_from_the_draft_with_new_text(made: Made, tmp_path: Path) -> None:
    with pytest.raises(OutriderError, match="holds a finished draft: --update goes on"):
        distill(told(made.out), Console(file=io.StringIO()))
    with pytest.raises(OutriderError, match="holds a draft of another target or size"):
        distill(told(made.out, layers=3), Console(file=io.StringIO()))
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"def function_{index}(", "category": "code"} for index in range(4)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    more = told(
        made.out, update=True, tokens="200", readings=1, prompts=str(prompts), time="10m", layers=None
    )
    report = distill(more, Console(file=io.StringIO()))
    assert report["round"] == 1 and report["untrained"] == made.report["untrained"]
    for temperature, one in report["acceptance"]["by_temperature"].items():
        assert one["acceptance"] > report["untrained"]["by_temperature"][temperature]["acceptance"]
    new = [json.loads(line) for line in (made.out / "work" / "text-1.jsonl").read_bytes().splitlines()]
    assert new and all(text["category"] == "code" for text in new)


@pytest.mark.timeout(600)
async def test_a_slim_draft_takes_from_its_target_what_is_the_targets(tmp_path: Path) -> None:
    out = tmp_path / "slim"
    short = told(out, slim=True, tokens="200", readings=1)
    report = await asyncio.to_thread(distill, short, Console(file=io.StringIO()))
    assert report["draft_token_ms"] > 0
    with safe_open(out / "model.safetensors", framework="pt") as weights:
        names = set(weights.keys())
    assert names and not any("embed" in name or "lm_head" in name for name in names)
    assert not [*out.glob("*token*")]
    engine = load_engine(str(out), drafts=True, lender=str(TARGET))
    target, _ = load_model(str(TARGET))
    assert torch.equal(engine.model.get_input_embeddings().weight, target.get_input_embeddings().weight)
    async with Cluster(TARGET) as cluster:
        await cluster.add_foreign_drafter(out)
        answer = await cluster.ask(list(range(300, 330)), SamplingParams(), 64)
    assert answer.accepted > 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tokens": "many"}, "--tokens must be a count such as 200K or 5M, not 'many'"),
        ({"time": "3"}, "--time must be a time such as 90s, 20m or 3h, not '3'"),
        ({"layers": 7}, "--layers must be at most 6, the target's, not 7"),
        ({"update": True}, "--update needs a draft in .* to go on from: leave it out the first time"),
        ({"prompts": "nowhere.jsonl"}, "--prompts nowhere.jsonl cannot be read"),
        ({"prompts": "/dev/zero"}, "--prompts /dev/zero is a device: name a file"),
        ({"target": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_in_one_sentence(
    options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(OutriderError, match=sentence) as error:
        distill(DistillOptions(**({"target": str(TARGET), "out": str(tmp_path)} | options)), Console())
    assert "\n" not in error.value.message


def test_the_older_half_of_a_record_is_read_too(tmp_path: Path) -> None:
    """A router that keeps prompts goes on in a new file as soon as one is full."""
    file = tmp_path / "prompts.jsonl"
    record = PromptRecord(file)
    record._handler.maxBytes = 100
    for token in range(3, 9):
        record.add("m", (token,) * 3)
    record.close()
    assert file.with_name("prompts.jsonl.1").exists()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    found = [one.ids for one in prompts.read(file, tokenizer)]
    assert len(found) > len(file.read_text().splitlines()) and found[-1] == (8, 8, 8)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("{", "line 2: is no JSON"),
        ('{"text": "a"}', 'line 2: must be {"prompt": TEXT}, '),
        ('{"prompt": ""}', "line 2: is empty"),
        ('{"prompt": "\\ud800"}', "line 2: is no valid Unicode"),
        ('{"prompt": "a\u2028b\x85c"}\n{', "line 3: is no JSON"),  # JSON's texts may have such line ends
        ('{"ids": [1, 100000]}', "line 2: has ids that are no tokens of this target"),
    ],
)
def test_a_line_of_the_prompts_that_cannot_be_read_is_named(line: str, sentence: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "import"}\n' + line)
    with pytest.raises(OutriderError, match=sentence):
        distill(told(tmp_path / "out", prompts=str(prompts)), Console())


def test_a_target_whose_template_ends_no_question_needs_prompts(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target")
    with pytest.raises(OutriderError, match="has no chat template to make up questions with: give --prompts"):
        distill(DistillOptions(target=str(target), out=str(tmp_path / "out")), Console())


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(OutriderError, match="holds something else: name a new or an empty folder"):
        distill(told(tmp_path), Console())
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with (
        Folder(tmp_path).alone(),
        pytest.raises(StartupError, match="another `outrider distill` is at work in"),
    ):
        distill(told(tmp_path), Console(file=io.StringIO()))
    assert not any((tmp_path / "work").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("state.json", '{"target": "a", "layers": [], "round": "x"}', Folder.state),
        ("state.json", '{"target": "a", "layers": [], "untrained": 3}', Folder.state),
        ("training.pt", "nonsense", Folder.training),
        ("heldout.jsonl", "nonsense\n", lambda folder: load(folder.heldout)),
        ("heldout.jsonl", "{}\n", lambda folder: load(folder.heldout)),
    ],
)
def test_what_is_damaged_in_a_folder_is_named(
    name: str, content: str, read: Callable[[Folder], object], tmp_path: Path
) -> None:
    folder = Folder(tmp_path)
    with folder.alone():
        (folder.work / name).write_text(content)
    with pytest.raises(StartupError, match=f"{name} is damaged: ") as error:
        read(folder)
    assert "\n" not in error.value.message


def test_a_run_does_not_go_on_from_what_another_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another that ended while this one read its target."""

    def another(target: str) -> Any:
        with Folder(tmp_path).alone():
            Folder(tmp_path).save_state(State(target, [0, 5], round=3, done=True))
        return load_model(target)

    monkeypatch.setattr(run, "load_model", another)
    with pytest.raises(StartupError, match=r"another run has changed .* meanwhile: say the command again"):
        distill(told(tmp_path), Console(file=io.StringIO()))
    state = Folder(tmp_path).state()
    assert state is not None and state.done


def test_texts_are_written_together_as_they_are_alone(tmp_path: Path) -> None:
    """More of them than are written at a time or have room, also one of which a step holds only a part."""
    engine = load_engine(str(build("llama", tmp_path / "target")), kv_memory_bytes=2**19)
    prompts = [
        Prompt(tuple((7 * at + number) % 90 for at in range(length)), str(number))
        for number, length in enumerate((300, 3, 270, 90, 5))
    ]
    temperatures = (0.0, 1.0, 0.7, 0.0, 1.0)
    assert (
        sum(len(prompt.ids) + 40 for prompt in prompts[:3]) > engine.pool.num_blocks * engine.pool.block_size
    )
    written = write(engine, prompts, temperatures, 40, 9, 3)
    together = dict(sorted((text.seed, (text, likely)) for text, likely, _ in written))
    assert engine.pool.available == engine.pool.num_blocks
    for at, (prompt, temperature) in enumerate(zip(prompts, temperatures, strict=True)):
        [(text, likely, _)] = write(engine, [prompt], [temperature], 40, 9 + at, 3)
        other, others = together[9 + at]
        assert text == other and np.array_equal(likely, others) and len(likely) == text.written
        assert text.ids[: text.prompt] == list(prompt.ids) and text.category == prompt.category
        if not temperature:
            best = likely["ids"][range(text.written), likely["probabilities"].argmax(1)]
            assert best.tolist() == text.ids[text.prompt :]


@pytest.mark.parametrize("new", [1024, 65536])
def test_no_text_is_longer_than_the_targets_context(tmp_path: Path, new: int) -> None:
    engine = load_engine(str(build("llama", tmp_path / "target")), kv_memory_bytes=2**22)
    engine.info = replace(engine.info, eos_token_ids=())
    asked = [Prompt((5, 6, 7)), Prompt((8,))]
    texts = [text for text, *_ in write(engine, asked, [1.0, 0.0], new, 1, 2)]
    assert [len(text.ids) for text in texts] == [engine.info.max_context] * 2
    assert [text.prompt for text in texts] == [1, 1]


def test_what_is_likely_is_the_targets_distribution_at_the_texts_temperature(tmp_path: Path) -> None:
    target = build("llama", tmp_path / "target")
    engine = load_engine(str(target), kv_memory_bytes=2**22)
    [(text, likely, _)] = write(engine, [Prompt((5, 6, 7))], [0.7], 12, 1, 1)
    model, _ = load_model(str(target))
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([text.ids[:-1]])).logits[0, text.prompt - 1 :]
    wanted = (logits / 0.7).softmax(-1)
    found = torch.zeros_like(wanted)
    ids, probabilities = (
        torch.from_numpy(likely[name].astype(kind)) for name, kind in (("ids", "i8"), ("probabilities", "f4"))
    )
    found.scatter_add_(1, ids, probabilities)
    least = wanted.topk(min(KEPT, wanted.shape[1])).values[:, -1:]
    assert torch.allclose(found[wanted >= least], wanted[wanted >= least], atol=1e-3)
    assert torch.all(found[wanted < least] == 0)


def test_what_a_kill_left_of_a_text_is_cut_off_here_and_beside(tmp_path: Path) -> None:
    file = tmp_path / "text-0.jsonl"
    texts = [Lesson(Text([1, 2, 3, at], 2, 0.0, at), np.zeros(2, PLACE), NO_STATES) for at in range(3)]
    for at, (_, likely, _) in enumerate(texts):
        likely["ids"][:] = at
    add(file, texts[:1])
    add(file, texts[1:2])
    whole = file.read_bytes()
    os.truncate(file, len(whole) - 5)
    assert load(file) == [texts[0][0]]
    add(file, texts[2:])
    found = load(file)
    assert found == [texts[0][0], texts[2][0]]
    assert [set(one["ids"].ravel().tolist()) for one in load_likely(file, found)] == [{0}, {2}]
    os.truncate(file.with_suffix(".likely"), 5)
    with pytest.raises(StartupError, match=r"text-0\.likely is damaged: remove .*text-0\.jsonl"):
        load_likely(file, load(file))
