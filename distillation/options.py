"""What `outrider distill` is told."""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.options.engine import EngineOptions
from outrider.options.model_id import checkpoint_name
from outrider.options.option import check, option, same, wrong

COUNT = re.compile(r"(\d+(?:\.\d+)?)([KM]?)")
TIME = re.compile(r"(\d+(?:\.\d+)?)([smh])")
READINGS, MORE_READINGS = 3, 8
UNITS = {"": 1, "K": 10**3, "M": 10**6, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class DistillOptions:
    """The options of the command. Checked when made: raises WrongOption."""

    target: str = option(help="Folder, GGUF file or Hugging Face id (ID@REVISION) of the target.")
    out: str = option(
        help="Folder to write the draft or speculator to; work/ in it holds what a run goes on from."
    )
    prompts: str | None = option(
        None,
        "File of JSON lines with a prompt or messages each, and perhaps a category.",
        metavar="FILE",
        shown="none: a chat model makes up questions",
    )
    tokens: str = option("1M", "Text that the target writes, in tokens: 200K, 5M.", metavar="COUNT")
    speculator: bool = option(
        False,
        "Make a speculator, by which the target guesses its next tokens itself, in place of a draft.",
    )
    layers: int | None = option(
        None, "Layers of the draft, taken from the target's.", least=1, shown="a sixth of the target's"
    )
    vocabulary: int = option(8192, "Most tokens that are guessed: the most frequent ones.", least=16)
    time: str | None = option(
        None, "Most time for text and training together: 90s, 20m, 3h.", metavar="TIME", shown="none"
    )
    length: int = option(256, "Most tokens of one answer.", least=8, most=65536)
    readings: int | None = option(
        None, "Times that the text is read.", least=1, shown=f"{READINGS}, of a speculator {MORE_READINGS}"
    )
    slim: bool = option(
        False,
        "Leave out embeddings and tokenizer: who drafts with it takes them from the target (--target).",
    )
    update: bool = option(False, "Go on from what is in the folder, with new text.")
    seed: int = option(0, "Seed of text and training.", least=0, most=2**31)
    device: str = same(EngineOptions, "device")
    quantization: str | None = same(EngineOptions, "quantization")

    def __post_init__(self) -> None:
        check(self)
        EngineOptions(device=self.device, quantization=self.quantization)  # raises what it does not take
        if not self.target or not self.out:
            raise wrong("out" if self.target else "target", "must not be empty")
        if self.speculator:
            for name, given in (("layers", self.layers is not None), ("slim", self.slim)):
                if given:
                    raise wrong(name, "is for a draft: leave it out with --speculator")
        if self.most_tokens < 1:
            raise wrong("tokens", "must be at least 1")
        if self.seconds <= 0:
            raise wrong("time", "must be more than nothing")

    @property
    def kind(self) -> str:
        """Returns what is made."""
        return "speculator" if self.speculator else "draft"

    @property
    def all_readings(self) -> int:
        return self.readings or (MORE_READINGS if self.speculator else READINGS)

    @property
    def most_tokens(self) -> int:
        return round(_read("tokens", self.tokens, COUNT, "a count such as 200K or 5M"))

    @property
    def seconds(self) -> float:
        """Returns the bound of time; infinite if there is none."""
        return _read("time", self.time, TIME, "a time such as 90s, 20m or 3h") if self.time else float("inf")

    @property
    def target_name(self) -> str:
        return checkpoint_name(self.target)


def _read(name: str, text: str, form: re.Pattern[str], wanted: str) -> float:
    found = form.fullmatch(text.strip())
    if found is None:
        raise wrong(name, f"must be {wanted}, not {text!r}")
    return float(found[1]) * UNITS[found[2]]
