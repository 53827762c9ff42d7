"""Keeps moving averages of what the steps showed, and what follows from them for the next step."""

from __future__ import annotations

from dataclasses import dataclass, field

from verifier.price import StepTime

SMOOTHING = 0.1
LONGEST_STEP = 1.8  # of a step in which others decode while a prompt is read, in steps without one
LEAST_READING = 4  # prompt tokens that are read beside those who decode, whatever they take
READING_SECONDS = 0.2  # of a step in which prompts are read and nobody decodes
READING_SHARE = 4  # the same at least, in steps of a single token
READING_STEPS = 4  # in a row; the step after them reads nothing, which shows what one without takes now
FEW_DRAFTS = 0.1  # of a step: of so few the mean cost is not known
LATELY = 0.5  # weight of the last step without a prompt in what such steps take lately


def no_profile() -> StepTime:
    """Returns a profile in which every step takes the same, so that tokens have no price."""
    return StepTime.measured({1: 1.0})


@dataclass(slots=True)
class Meter:
    """The averages, fed with every step. The zeros stand for "not measured yet"."""

    step_time: StepTime = field(default_factory=no_profile)
    step_seconds: float = 0.0  # of steps in which nobody's prompt was read in, as all that follows
    step_tokens: float = 0.0
    step_drafts: float = 0.0  # of those tokens
    committed: float = 0.0  # tokens a step, all sessions together
    waited_seconds: float = 0.0  # before a step
    starvation: float = 0.0  # share of sessions with k > 0 that had no draft
    prompt_token_seconds: float = 0.0  # that one more prompt token adds to a step
    slowness: float = 1.0  # what steps without a prompt took lately, over what `step_time` says
    _read: int = 0  # steps in a row that read prompts

    def __post_init__(self) -> None:
        self.prompt_token_seconds = self.step_time.slope(float(self.step_time.tokens[-1]))

    def observe(
        self,
        seconds: float,
        tokens: int,
        committed: int,
        starved: float | None,
        waited: float = 0.0,
        drafts: int = 0,
    ) -> None:
        """Takes in a step of `tokens` tokens, so many of them `drafts`, `waited` seconds after the engine was
        free for it. `seconds` counts from there to its end, so that what goes on around the forward
        pass is part of it. `starved`: None if no session wanted drafts."""
        weight = SMOOTHING if self.step_seconds else 1.0
        self.step_seconds += weight * (seconds - self.step_seconds)
        self.step_tokens += weight * (tokens - self.step_tokens)
        self.step_drafts += weight * (drafts - self.step_drafts)
        self.committed += weight * (committed - self.committed)
        self.waited_seconds += weight * (waited - self.waited_seconds)
        if starved is not None:
            self.starvation += SMOOTHING * (starved - self.starvation)
        self._read = 0
        lately = self._without(tokens)
        lately += LATELY * (min(seconds, 2 * lately) - lately)  # one slow step is not believed at once
        self.step_time.observe(tokens, seconds)
        now = self.step_time.at(tokens)
        if lately > 0 and now > 0:
            self.slowness = lately / now

    def observe_reading(self, seconds: float, decoding: int, prompt_tokens: int) -> None:
        """Takes in a step that read so many prompt tokens beside `decoding` tokens."""
        each = max(0.0, seconds - self._without(decoding)) / prompt_tokens
        if self.prompt_token_seconds:  # one slow step is not believed at once
            each = min(each, 2 * self.prompt_token_seconds)
        self.prompt_token_seconds += SMOOTHING * (each - self.prompt_token_seconds)
        self._read += 1

    def reading(self, decoding: int) -> int:
        """Returns the most prompt tokens to read beside `decoding` tokens, so that those who decode hardly
        notice: the step takes at most LONGEST_STEP times what it would take without.

        Every so many steps it is 0: if prompts never end, it would not be noticed that the machine became
        slow, as others run on it too. All of that would be put down to the prompts, and ever less of them
        read."""
        if self._read >= READING_STEPS:
            return 0
        if self.prompt_token_seconds <= 0:
            return 2**31
        spare = (LONGEST_STEP - 1) * self._without(decoding)
        return max(LEAST_READING, round(spare / self.prompt_token_seconds))

    def reading_alone(self) -> int:
        """Returns the most prompt tokens to read where nobody decodes. Who comes then waits until the step
        is over: it takes READING_SECONDS, or longer if else a good part of it would not be reading."""
        if self.prompt_token_seconds <= 0:
            return 2**31
        least = self._without(1)
        spare = max(READING_SECONDS - least, READING_SHARE * least)
        return max(LEAST_READING, round(spare / self.prompt_token_seconds))

    def _without(self, decoding: int) -> float:
        """Returns the seconds that a step with so many tokens and no prompt takes now."""
        return self.slowness * self.step_time.at(decoding)

    @property
    def goodput(self) -> float:
        """Returns the tokens committed a second, waits included."""
        return self.committed / (self.step_seconds + self.waited_seconds) if self.step_seconds else 0.0

    @property
    def price(self) -> float:
        """Returns the committed tokens that one more token in a step costs."""
        return self.step_time.price(self.goodput, self.step_tokens)

    @property
    def draft_cost(self) -> float:
        """Returns the committed tokens that a draft token costs, in the mean over those of a step. The price
        is what one more would cost: where T has a stair, those that are in the step cost far less."""
        if self.step_drafts < FEW_DRAFTS:
            return self.price
        without = self.step_time.at(self.step_tokens - self.step_drafts)
        seconds = self.step_time.at(self.step_tokens) - without
        return min(self.goodput * seconds / self.step_drafts, 1.0)
