"""What a drafter is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.options.engine import EngineOptions, StepLimits
from outrider.options.memory import parse_memory
from outrider.options.model_id import checkpoint_name
from outrider.options.option import check, option, wrong
from outrider.options.protection import Protection
from outrider.options.sessions import SPECULATION
from outrider.options.telemetry import Export
from outrider.options.worker import Joining, Listen, Registration, check_joining, check_worker


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """The options of a drafter. They are checked once, here: raises StartupError with a sentence that names
    the flag to change."""

    draft: str | None = option(
        None,
        "Folder, GGUF file or Hugging Face id (ID@REVISION) of the draft model.",
        shown="none: --propose says how",
    )
    propose: str | None = option(
        None,
        "Guess without a draft model: suffix looks up what followed the same tokens in the text so far.",
        choices=("suffix",),
        shown="none: the draft model guesses",
    )
    registration: Registration = field(default=Registration())
    joining: Joining = field(default=Joining())
    listen: Listen = field(default=Listen())
    protection: Protection = field(default=Protection())
    engine: EngineOptions = field(default=EngineOptions())
    limits: StepLimits = field(default=StepLimits())
    branches: bool = option(
        True,
        "Draft on from likely corrections, too, where no session wants a next token.",
        negated=True,
        heading=SPECULATION,
    )
    cascade: bool = option(
        True,
        "Let the draft model check several tokens in one step, where its text has had the same ones before.",
        negated=True,
        heading=SPECULATION,
    )
    target: str | None = option(
        None,
        "Folder, GGUF file or Hugging Face id of the target, or HOST:PORT of a worker that serves it, if the "
        "draft model has another tokenizer: the target's is read there. A draft without embeddings takes "
        "those of the folder or file.",
        shown="the draft model's own tokenizer is the target's",
    )
    remember_answers: str | None = option(
        None,
        "With --propose suffix: look up in finished answers of the same key, salt and model, too; so much "
        "memory for them.",
        metavar="SIZE",
        shown="none are remembered",
        heading=SPECULATION,
    )
    export: Export = field(default=Export())

    def __post_init__(self) -> None:
        check(self)
        if self.propose is None:
            if self.draft is None:
                raise wrong("draft", "is missing: name a draft model, or say --propose suffix")
            if not self.draft:
                raise wrong("draft", "must name a folder or a hub id, not nothing")
            if self.target == "":
                raise wrong("target", "must name a folder or a hub id, not nothing")
            if self.remember_answers is not None:
                raise wrong("remember_answers", "is for --propose suffix: leave it out with a draft model")
        else:
            self._check_propose(self.propose)
        check_joining(self.joining, self.registration, self.listen, self.protection)
        self.remembered_bytes  # noqa: B018  # raises where it is no size
        check_worker(self.registration, self.listen, self.protection)

    def _check_propose(self, kind: str) -> None:
        told = {
            "draft": self.draft is not None,
            "target": self.target is not None,
            "device": self.engine.device != "cpu",
            "tensor_parallel_size": self.engine.tensor_parallel_size > 1,
            "quantization": self.engine.quantization is not None,
            "lora": self.engine.lora is not None,
        }
        for name in (name for name, given in told.items() if given):
            raise wrong(name, f"is for a draft model, which --propose {kind} replaces: leave one out")

    @property
    def remembered_bytes(self) -> int:
        """Returns the memory for finished answers."""
        given = self.remember_answers
        return 0 if given is None else parse_memory(given, "remember_answers")

    @property
    def model_name(self) -> str:
        """Returns the draft model's name, for logs and descriptions."""
        return checkpoint_name(self.draft or "")
