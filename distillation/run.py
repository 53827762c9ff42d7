"""A run of `outrider distill`: the target writes, the student learns, and what came of it is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from distillation import prompts as asking
from distillation import texts as kept
from distillation.cut import chosen_layers, frequent, usual_layers
from distillation.draft import Draft
from distillation.folder import Folder, State
from distillation.measuring import step_ms
from distillation.options import DistillOptions
from distillation.progress import Stage
from distillation.prompts import Prompt
from distillation.speculator import SpeculatorInMaking
from distillation.states import KeptStates
from distillation.student import Student
from distillation.texts import Lesson, Text
from distillation.writing import write
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_model, load_tokenizer
from outrider.engine.parts import CALLS, usual
from outrider.errors import StartupError
from outrider.options.memory import Share
from outrider.options.option import wrong

TEMPERATURES = (0.0, 0.7, 1.0)  # of the texts, in turn
HELD_OUT = 12  # prompts, each of which is answered at every temperature
SESSIONS = {"cpu": 64, "cuda": 256}  # that write at a time
AHEAD = 2  # times as many texts as are needed if none ends early, at the end
ASKED = 8  # times as many prompts are answered one after the other before others are made up
ON_GPU = Share(40)  # of its memory for the keys and values of the target
TIMED_BYTES = 2**24  # for those of a draft, of which single tokens are timed
TEXT_SHARE = 0.5  # of the time, if it is bounded
SEEDS = 2**24  # that a round has for its texts


def distill(options: DistillOptions, console: Console) -> dict[str, Any]:
    """Returns the report. Raises StartupError with a sentence that says what to change."""
    folder = Folder(Path(options.out).expanduser())
    found, state = folder.state(), folder.state()
    made = options.kind
    if options.update and state is None:
        raise wrong("update", f"needs a {made} in {options.out} to go on from: leave it out the first time")
    if state is not None and state.kind != made:
        say = "leave out --speculator" if options.speculator else "say --speculator"
        raise StartupError(f"{options.out} holds a {state.kind}: {say}, or name another folder")
    target, info = load_model(options.target)
    layers = [] if options.speculator else _layers(options, state, target.config.num_hidden_layers)
    new = State(info.fingerprint, layers, options.speculator)
    state = state or new
    if (state.target, state.layers) != (new.target, new.layers):
        what = "another target" if options.speculator else "another target or size"
        raise StartupError(f"{options.out} holds a {made} of {what}: name another folder")
    if state.done and not options.update:
        raise StartupError(f"{options.out} holds a finished {made}: --update goes on from it with new text")
    if state.done:
        state.round, state.done, state.seconds = state.round + 1, False, 0.0
    with folder.alone():
        if folder.state() != found:
            raise StartupError(f"another run has changed {options.out} meanwhile: say the command again")
        return _Run(options, folder, state, target, console).run()


def _layers(options: DistillOptions, state: State | None, count: int) -> list[int]:
    """Returns which of a target's `count` layers a draft has."""
    layers = options.layers or (len(state.layers) if state else usual_layers(count))
    if layers > count:
        raise wrong("layers", f"must be at most {count}, the target's, not {layers}")
    return chosen_layers(count, layers)


class _Run:
    """What the parts of a run share."""

    def __init__(
        self, options: DistillOptions, folder: Folder, state: State, target: Any, console: Console
    ) -> None:
        self.options, self.folder, self.state, self.console = options, folder, state, console
        files = load_tokenizer(options.target)
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(files.json), **files.special_tokens
        )
        self.tokenizer.chat_template = files.chat_template
        self.given = asking.read(Path(options.prompts), self.tokenizer) if options.prompts else []
        self.template = None if self.given else asking.template_of(self.tokenizer, options.target_name)
        self.student: Student = (
            SpeculatorInMaking(target)
            if options.speculator
            else Draft(target, state.layers, self.tokenizer, options.slim)
        )
        del target
        self.device = torch.device(options.device)
        self.sessions = SESSIONS[self.device.type]
        self.engine = self._load(options.target, None if self.device.type == "cpu" else ON_GPU)
        self.states = KeptStates(self.engine.model) if self.student.width else None
        self.began = time.monotonic() - state.seconds
        folder.save_state(state)

    def run(self) -> dict[str, Any]:
        heldout = self._heldout()
        texts = self._texts()
        vocabulary = self._learn(texts, heldout)
        report = self._report(texts, heldout, vocabulary)
        self.folder.save_report(report)
        self.state.done = True
        self._spent()
        return report

    def _load_draft(self, path: str) -> Engine:
        return self._load(path, TIMED_BYTES, drafts=True)

    def _load(self, path: str, kv_memory_bytes: int | Share | None, drafts: bool = False) -> Engine:
        options = self.options
        parts = None
        if self.student.width and self.device.type == "cuda":  # what is recorded notes no states
            parts = replace(usual(self.device, None, options.quantization), runner=CALLS)
        return load_engine(
            path,
            device=options.device,
            quantization=options.quantization,
            kv_memory_bytes=kv_memory_bytes,
            parts=parts,
            drafts=drafts,
            lender=self.options.target,
        )

    def _spent(self) -> None:
        self.state.seconds = time.monotonic() - self.began
        self.folder.save_state(self.state)

    def _heldout(self) -> list[Lesson]:
        """Returns the target's answers to prompts that the student does not learn from."""
        found = kept.load(self.folder.heldout, self.student.width)
        total = HELD_OUT * len(TEMPERATURES)
        if len(found) < total:
            kept.remove(self.folder.heldout)  # what a kill has cut short
            held = self._split()[0] if self.given else list(islice(self._questions(2**60, 0), HELD_OUT))
            prompts = [held[at % len(held)] for at in range(HELD_OUT) for _ in TEMPERATURES]
            with Stage("held-out text", total, self.console) as stage:
                written = []
                for each in self._write(prompts, 0, 2**61):
                    written.append(each)
                    stage.at(len(written))
            kept.add(self.folder.heldout, written)
            found = [each.text for each in written]
        return kept.load_lessons(self.folder.heldout, found, self.student.width)

    def _texts(self) -> list[Text]:
        """Returns what the target wrote for this round, at least one text."""
        file, seed = self.folder.texts(self.state.round), (self.options.seed * 64 + self.state.round) * SEEDS
        found = kept.load(file, self.student.width)
        most, done = self.options.most_tokens, sum(text.written for text in found)
        begun = max((text.seed + 1 - seed for text in found), default=0)
        prompts: Iterator[Prompt]
        if self.given:
            prompts = islice(asking.shuffled(self._split()[1], seed), begun, None)
        else:
            prompts = self._questions(2**62 + seed, begun)
        with Stage("the target's text", most, self.console) as stage:
            while done < most and not (found and self._over(TEXT_SHARE)):
                wanted = AHEAD * -(-(most - done) // self.options.length)
                some = list(islice(prompts, min(self.sessions * ASKED, wanted)))
                for each in self._write(some, begun, seed):
                    kept.add(file, [each])
                    found.append(each.text)
                    done += each.text.written
                    self._spent()
                    stage.at(min(done, most), f"{done:,} tokens")
                    if done >= most or self._over(TEXT_SHARE):
                        break
                begun += len(some)
        return found

    def _over(self, share: float) -> bool:
        return time.monotonic() - self.began >= share * self.options.seconds

    def _split(self) -> tuple[list[Prompt], list[Prompt]]:
        """Returns the held-out prompts of the user's, evenly spread over the file, and the others."""
        every = max(2, len(self.given) // HELD_OUT)
        held = self.given[::every][:HELD_OUT]
        return held, [prompt for prompt in self.given if prompt not in held] or self.given

    def _questions(self, seed: int, done: int) -> Iterator[Prompt]:
        """Yields questions of the target's own; after a kill other ones than the `done` before."""
        assert self.template is not None
        empty = 0
        for first in range(done, SEEDS, self.sessions):
            before = [Prompt(self.template.before)] * self.sessions
            drawn = [1.0] * self.sessions
            made = write(self.engine, before, drawn, asking.QUESTION_TOKENS, seed + first, self.sessions)
            asked = [
                asking.prompt_of(self.tokenizer, self.template, text.ids[text.prompt :]) for text, *_ in made
            ]
            questions = [prompt for prompt in asked if prompt is not None]
            empty = 0 if questions else empty + 1
            if empty == 8:
                raise StartupError(f"{self.options.target_name} makes up no questions: give --prompts")
            yield from questions

    def _write(self, prompts: Sequence[Prompt], begun: int, seed: int) -> Iterator[Lesson]:
        """Yields the answers to prompts, the first of which is the `begun`th that is asked with that seed."""
        temperatures = [TEMPERATURES[at % len(TEMPERATURES)] for at in range(begun, begun + len(prompts))]
        length, seed = self.options.length, seed + begun
        return write(self.engine, prompts, temperatures, length, seed, self.sessions, self.states)

    def _learn(self, texts: Sequence[Text], heldout: Sequence[Lesson]) -> torch.Tensor:
        """Trains the student, which then stands in its folder, and returns its vocabulary."""
        saved, options = self.folder.training(), self.options
        going_on = saved is not None and saved["round"] == self.state.round
        known = saved is not None and (going_on or self.student.keeps_vocabulary)
        vocabulary = torch.tensor(saved["vocabulary"] if saved is not None and known else self._most(texts))
        learner = self.student.begin(
            vocabulary.to(self.device),
            kept.load_lessons(self.folder.texts(self.state.round), texts, self.student.width),
            options.seed + self.state.round,
            options.all_readings,
        )
        if saved is not None and going_on:
            learner.restore(saved)
        elif saved is not None:
            learner.load(saved)
        elif not self.state.untrained:
            self.state.untrained = self.student.acceptance(heldout)
            self._spent()  # before the first step is kept: who goes on from that cannot measure it any more

        def keep() -> None:
            learner.save(self.folder, self.state.round)
            self._spent()

        until = self.began + options.seconds
        with Stage("training", learner.steps, self.console) as stage:
            learner.run(until, max(1.0, until - time.monotonic()), keep, stage.at)
        self.trained = self.student.acceptance(heldout)
        self.steps = learner.taken
        self.student.save(self.folder.path)
        return vocabulary

    def _most(self, texts: Sequence[Text]) -> list[int]:
        """Returns the ids of the most frequent tokens, of the first round's text too."""
        first = kept.load(self.folder.texts(0), self.student.width) if self.state.round else []
        info = self.engine.info
        return frequent(
            (text.ids for text in [*first, *texts]),
            self.options.vocabulary,
            info.vocab_size,
            info.eos_token_ids,
        )

    def _report(
        self, texts: Sequence[Text], heldout: Sequence[Lesson], vocabulary: torch.Tensor
    ) -> dict[str, Any]:
        ids = set(vocabulary.tolist())
        written = [token for text, *_ in heldout for token in text.ids[text.prompt :]]
        return {
            "options": asdict(self.options),
            "round": self.state.round,
            "text_tokens": sum(text.written for text in texts),
            "training_steps": self.steps,
            "vocabulary": len(ids),
            "in_vocabulary": round(sum(token in ids for token in written) / max(1, len(written)), 4),
            "acceptance": self.trained,
            "untrained": self.state.untrained,
            **self.student.figures(self.folder.path, self.engine, self._load_draft),
            "target_step_ms": step_ms(self.engine),
            "seconds": round(time.monotonic() - self.began, 1),
        }
