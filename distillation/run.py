"""A run of `outrider distill`: the target writes, the draft learns, and what came of it is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from distillation import prompts as asking
from distillation import texts as kept
from distillation.cut import chosen_layers, cut, freeze, frequent, save, usual_layers
from distillation.folder import REPORT, Folder, State
from distillation.learning import Learner, Lesson
from distillation.measuring import acceptance, step_ms
from distillation.options import DistillOptions
from distillation.progress import Stage
from distillation.prompts import Prompt
from distillation.texts import Text
from distillation.writing import write
from outrider.engine.draft_vocabulary import reduce_output
from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine, load_model, load_tokenizer
from outrider.errors import StartupError
from outrider.options.memory import Share
from outrider.options.option import wrong

TEMPERATURES = (0.0, 0.7, 1.0)  # of the texts, in turn
HELD_OUT = 12  # prompts, each of which is answered at every temperature
SESSIONS = {"cpu": 64, "cuda": 256}  # that write at a time
ASKED = 8  # times as many prompts are answered one after the other before others are made up
ON_GPU = Share(40)  # of its memory for the keys and values of the target, and none for those of the draft
TEXT_SHARE = 0.5  # of the time, if it is bounded
SEEDS = 2**24  # that a round has for its texts


def distill(options: DistillOptions, console: Console) -> dict[str, Any]:
    """Returns the report. Raises StartupError with a sentence that says what to change."""
    folder = Folder(Path(options.out).expanduser())
    state = folder.state()
    if options.update and state is None:
        raise wrong("update", f"needs a draft in {options.out} to go on from: leave it out the first time")
    target, info = load_model(options.target)
    count = target.config.num_hidden_layers
    layers = options.layers or (len(state.layers) if state else usual_layers(count))
    if layers > count:
        raise wrong("layers", f"must be at most {count}, the target's, not {layers}")
    new = State(info.fingerprint, chosen_layers(count, layers))
    state = state or new
    if (state.target, state.layers) != (new.target, new.layers):
        raise StartupError(f"{options.out} holds a draft of another target or size: name another folder")
    if state.done and not options.update:
        raise StartupError(f"{options.out} holds a finished draft: --update goes on from it with new text")
    if state.done:
        state.round, state.done, state.seconds = state.round + 1, False, 0.0
    return _Run(options, folder, state, target, console).run()


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
        self.draft = cut(target, state.layers)
        del target
        self.device = torch.device(options.device)
        self.sessions = SESSIONS[self.device.type]
        self.engine = self._load(options.target)
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

    def _load(self, path: str, drafts: bool = False) -> Engine:
        options = self.options
        return load_engine(
            path,
            device=options.device,
            quantization=options.quantization,
            kv_memory_bytes=None if self.device.type == "cpu" else ON_GPU,
            drafts=drafts,
            lender=self.options.target,
        )

    def _spent(self) -> None:
        self.state.seconds = time.monotonic() - self.began
        self.folder.save_state(self.state)

    def _heldout(self) -> list[Text]:
        """Returns the target's answers to prompts that the draft does not learn from."""
        found = kept.load(self.folder.heldout)
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
            found = [text for text, _ in written]
        return found

    def _texts(self) -> list[Text]:
        """Returns what the target wrote for this round, at least one text."""
        file, seed = self.folder.texts(self.state.round), (self.options.seed * 64 + self.state.round) * SEEDS
        found = kept.load(file)
        most, done = self.options.most_tokens, sum(text.written for text in found)
        begun = max((text.seed + 1 - seed for text in found), default=0)
        prompts: Iterator[Prompt]
        if self.given:
            prompts = islice(asking.shuffled(self._split()[1], seed), begun, None)
        else:
            prompts = self._questions(2**62 + seed, begun)
        with Stage("the target's text", most, self.console) as stage:
            while done < most and not (found and self._over(TEXT_SHARE)):
                some = list(islice(prompts, self.sessions * ASKED))
                for text, likely in self._write(some, begun, seed):
                    kept.add(file, [(text, likely)])
                    found.append(text)
                    done += text.written
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
                asking.prompt_of(self.tokenizer, self.template, text.ids[text.prompt :]) for text, _ in made
            ]
            questions = [prompt for prompt in asked if prompt is not None]
            empty = 0 if questions else empty + 1
            if empty == 8:
                raise StartupError(f"{self.options.target_name} makes up no questions: give --prompts")
            yield from questions

    def _write(self, prompts: Sequence[Prompt], begun: int, seed: int) -> Iterator[Lesson]:
        """Yields the answers to prompts, the first of which is the `begun`th that is asked with that seed."""
        temperatures = [TEMPERATURES[at % len(TEMPERATURES)] for at in range(begun, begun + len(prompts))]
        return write(self.engine, prompts, temperatures, self.options.length, seed + begun, self.sessions)

    def _learn(self, texts: Sequence[Text], heldout: Sequence[Text]) -> torch.Tensor:
        """Trains the draft, which then stands in its folder, and returns its vocabulary."""
        saved = self.folder.training()
        going_on = saved is not None and saved["round"] == self.state.round
        known = kept.load(self.folder.texts(0)) if self.state.round else []
        ids = frequent(
            (text.ids for text in [*known, *texts]),
            self.options.vocabulary,
            self.engine.info.vocab_size,
            self.engine.info.eos_token_ids,
        )
        vocabulary = torch.tensor(saved["vocabulary"] if saved is not None and going_on else ids)
        freeze(self.draft)
        whole = self.draft.get_output_embeddings()
        reduce_output(self.draft, vocabulary)
        self.draft.to(self.device)
        vocabulary = vocabulary.to(self.device)
        likely = kept.load_likely(self.folder.texts(self.state.round), texts)
        learner = Learner(
            self.draft,
            vocabulary,
            list(zip(texts, likely, strict=True)),
            self.options.seed + self.state.round,
            self.options.readings,
        )
        if saved is not None and going_on:
            learner.restore(saved)
        elif saved is not None:
            self.draft.load_state_dict(saved["learned"], strict=False)
        elif not self.state.untrained:
            self.state.untrained = acceptance(self.draft, heldout, vocabulary)
            self._spent()  # before the first step is kept: who goes on from that cannot measure it any more

        def keep() -> None:
            learner.save(self.folder, self.state.round)
            self._spent()

        until = self.began + self.options.seconds
        with Stage("training", learner.steps, self.console) as stage:
            learner.run(until, max(1.0, until - time.monotonic()), keep, stage.at)
        self.trained = acceptance(self.draft, heldout, vocabulary)
        self.steps = learner.taken
        self.draft.to("cpu").set_output_embeddings(whole)
        save(self.draft, self.tokenizer, vocabulary.tolist(), self.folder.path, self.options.slim)
        return vocabulary

    def _report(
        self, texts: Sequence[Text], heldout: Sequence[Text], vocabulary: torch.Tensor
    ) -> dict[str, Any]:
        ids = set(vocabulary.tolist())
        written = [token for text in heldout for token in text.ids[text.prompt :]]
        engine = self._load(str(self.folder.path), drafts=True)
        return {
            "options": asdict(self.options),
            "round": self.state.round,
            "text_tokens": sum(text.written for text in texts),
            "training_steps": self.steps,
            "layers": self.state.layers,
            "vocabulary": len(ids),
            "in_vocabulary": round(sum(token in ids for token in written) / max(1, len(written)), 4),
            "acceptance": self.trained,
            "untrained": self.state.untrained,
            "draft_token_ms": step_ms(engine),
            "target_step_ms": step_ms(self.engine),
            "seconds": round(time.monotonic() - self.began, 1),
        }


def lines(report: dict[str, Any], out: str) -> list[str]:
    """Returns the report as people read it."""
    shown, before = "5", report["untrained"].get("by_temperature", {})
    takes = (report["draft_token_ms"], report["target_step_ms"])
    return [
        f"temperature  accepted  untrained  tokens a step at k = {shown}",
        *(
            f"{temperature:>11}  {one['acceptance']:>8.3f}  {before[temperature]['acceptance']:>9.3f}  "
            f"{one['tokens_per_step'][shown]:.2f}"
            for temperature, one in report["acceptance"]["by_temperature"].items()
        ),
        *(f"{name}: {share:.3f}" for name, share in report["acceptance"]["by_category"].items()),
        f"{report['vocabulary']:,} tokens to guess, which are {report['in_vocabulary']:.1%} of the text",
        f"a draft token takes {takes[0]} ms, a step of the target {takes[1]} ms",
        f"outrider serve --target {report['options']['target']} --draft {out}",
        f"{out}/{REPORT} has all figures",
    ]
