"""What a session has committed, step by step: what its reader gets, and what its log is written from."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from outrider.net.draft_right import MOST_SEATS
from outrider.wire.guesses import NO_OWN, DrafterCounts, Guesses, OwnCounts
from outrider.wire.hello import MAX_NAME
from outrider.wire.logprobs import Logprobs, OutputLogprobs, PromptLogprobs
from outrider.wire.session import FinishReason, SessionId
from outrider.wire.session_log import LoggedRequest, end_record, log_from_bytes, request_record, step_record
from outrider.wire.verifier_sessions import Committed
from router.requests import GenerationRequest, TokensCommitted

STEP_BYTES = 12  # in memory, beside its tokens
TOKEN_BYTES = 4
LOGPROB_BYTES = 8  # an id and a number
GUESS_BYTES = 250
OWN_BYTES = 250  # of a step
DRAFTERS_BYTES = 600  # of a step
REQUEST_BYTES = 500  # beside the prompt and what the API keeps
MOST_BESIDE = 1024  # draft tokens that a verifier may say it verified beside a path, in a step


class Transcript:
    """Append-only. As records (see outrider/store/logs.py): the request, the steps, the end."""

    def __init__(self, request: GenerationRequest, answer: bytes = b"") -> None:
        """`request` has its session_id and fingerprint. `answer`: what the API keeps with the session."""
        self.request = request
        self.answer = answer
        params = request.params
        self._scores = params.logprobs is not None or params.prompt_logprobs is not None
        self.log = array("I", request.params.prompt)  # committed tokens by position: prompt, then output
        self.end: FinishReason | None = None
        self._ends = array("I")  # by step: tokens of the log up to and including it
        self._accepted = array("I")
        self._verified = array("I")
        self._beside: dict[int, int] = {}  # by step, where there are any
        self._cached_prompt_tokens = 0
        self._logprobs = OutputLogprobs()  # by output token, if asked for
        self._prompt: PromptLogprobs | None = None  # if asked for
        self._numerics: dict[int, str] = {}  # by the step from which on they hold
        self._guesses: dict[int, Guesses] = {}  # by step, if asked for
        self._guessed = 0  # of them all, and of their steps
        self._own: dict[int, OwnCounts] = {}  # by step, where there are any
        self._drafters: dict[int, tuple[DrafterCounts, ...]] = {}  # by step, where several drafted
        self._seconds: dict[int, float] = {}  # since it was begun here, by step, if asked for; not in the log
        self.steps = 0
        self.numerics = ""  # of the verifier that committed the last step; empty = none, or not known
        self._newest: TokensCommitted | None = None  # the last step, which most who read one ask for

    @classmethod
    def from_log(cls, session_id: SessionId, content: bytes) -> Transcript:
        """Returns what a whole log holds. Raises InvalidRequest if it is none."""
        logged = log_from_bytes(content)
        asked = logged.request
        request = GenerationRequest(
            model=asked.model,
            params=asked.params,
            num_speculative_tokens=asked.num_speculative_tokens,
            session_id=session_id,
            fingerprint=asked.fingerprint,
            owner=asked.owner,
        )
        made = cls(request, asked.answer)
        for step in logged.steps:
            made.add(TokensCommitted(*step))
        made.end = logged.end
        return made

    @property
    def output(self) -> list[int]:
        return self.log[len(self.request.params.prompt) :].tolist()

    @property
    def output_tokens(self) -> int:
        return len(self.log) - len(self.request.params.prompt)

    @property
    def is_full(self) -> bool:
        """Returns whether the output has all tokens that it may have."""
        return self.output_tokens >= self.request.params.max_tokens

    def step(self, index: int) -> TokensCommitted:
        if self._newest is not None and index == self.steps - 1:
            return self._newest
        prompt = len(self.request.params.prompt)
        start = self._ends[index - 1] if index else prompt
        return TokensCommitted(
            tuple(self.log[start : self._ends[index]]),
            self._accepted[index],
            self._verified[index],
            0 if index else self._cached_prompt_tokens,
            self._numerics.get(index, ""),
            self._logprobs.part(start - prompt, self._ends[index] - prompt) if self._logprobs else (),
            self._guesses.get(index, ()),
            None if index else self._prompt,
            self._beside.get(index, 0),
            self._own.get(index, NO_OWN),
            self._drafters.get(index, ()),
            self._seconds.get(index),
        )

    def known(self) -> Iterator[TokensCommitted]:
        """Returns the steps so far, one after the other; another thread may go through them."""
        return map(self.step, range(self.steps))

    def add(self, step: TokensCommitted) -> None:
        if not self.steps:
            self._cached_prompt_tokens = step.cached_prompt_tokens
            self._prompt = step.prompt
        if step.numerics:
            self.numerics = self._numerics[self.steps] = step.numerics
        if step.beside:
            self._beside[self.steps] = step.beside
        if step.own is not NO_OWN and any(step.own):
            self._own[self.steps] = step.own
        if step.drafters:
            self._drafters[self.steps] = step.drafters
        if step.logprobs:
            self._logprobs.extend(step.logprobs)
        if self.request.params.guesses:
            self._guessed += 1 + len(step.guesses)
            if step.guesses:
                self._guesses[self.steps] = step.guesses
            if step.seconds is not None:
                self._seconds[self.steps] = step.seconds
        self.log.extend(step.tokens)
        self._ends.append(len(self.log))
        self._accepted.append(step.accepted)
        self._verified.append(step.verified)
        self.steps += 1
        # What is kept in another form is told in that.
        other = step.logprobs or step.guesses or step.prompt or step.cached_prompt_tokens or step.seconds
        self._newest = None if other else step

    def fault_in(self, told: Committed, vocab_size: int) -> str:
        """Returns what of it no sound verifier tells, as a clause; empty = all may be so."""
        base, tokens, accepted, verified = told.base, told.tokens, told.accepted, told.verified
        if not self.continued_by(base, tokens, accepted, verified, vocab_size):
            drafts = f"{accepted} of {verified} drafts accepted"
            return f"{len(tokens)} tokens ({drafts}) at {base} do not continue a log of {len(self.log)}"
        if self._scores or not told.plain:
            prompt = None if self.steps else told.prompt  # at a second verifier it may come again
            if not self.scored_as_asked(tokens, told.logprobs, prompt, vocab_size):
                return "its log-probabilities are not what was asked for"
            if not self.guessed_as_asked(told, vocab_size):
                return "the guesses of a step are not what was asked for"
        return ""

    def continued_by(
        self, base: int, tokens: Sequence[int], accepted: int, verified: int, vocab_size: int
    ) -> bool:
        """Returns whether a sound verifier may commit these tokens at that position, in a step that accepted
        so many of so many draft tokens: they repeat what is known or follow it, are the model's, come
        after no stop token, and are no more than was asked for."""
        known = len(self.log) - base
        if known < 0:
            return False
        params = self.request.params
        most, stops = params.max_tokens, params.stop_token_ids
        new = len(tokens) - known
        if new > 0 and stops:
            before = tokens[known:-1]  # the last may be one
            if (before and any(token in stops for token in before)) or (self.steps and self.log[-1] in stops):
                return False
        return (
            (not known or list(tokens[:known]) == self.log[base : base + len(tokens)].tolist())
            and accepted <= min(verified, len(tokens))
            and verified <= most
            and new <= most - self.output_tokens
            and max(tokens, default=0) < vocab_size
        )

    def scored_as_asked(
        self, tokens: Sequence[int], logprobs: Logprobs, prompt: PromptLogprobs | None, vocab_size: int
    ) -> bool:
        """Returns whether a sound verifier may tell these log-probabilities of the tokens, and of the prompt
        with the first of them."""
        params = self.request.params
        if self.steps or params.prompt_logprobs is None:
            prompt_fits = prompt is None
        else:
            count = params.prompt_logprobs
            prompt_fits = prompt is not None and prompt.fits(len(params.prompt), count, vocab_size)
        return prompt_fits and self._scored(tokens, logprobs, vocab_size)

    def _scored(self, tokens: Sequence[int], logprobs: Logprobs, vocab_size: int) -> bool:
        count = self.request.params.logprobs
        if count is None:
            return not logprobs
        return len(logprobs) == len(tokens) and all(
            len(one.top) == min(count, vocab_size) and all(token < vocab_size for token, _ in one.top)
            for one in logprobs
        )

    def guessed_as_asked(self, step: Committed, vocab_size: int) -> bool:
        """Returns whether a sound verifier may tell these guesses of the step, or none."""
        if step.beside > MOST_BESIDE or not step.own.possible(step.accepted, step.verified):
            return False
        drafted = step.verified + step.beside
        if len(step.drafters) > MOST_SEATS or not all(
            one.possible(step.accepted, drafted) for one in step.drafters
        ):
            return False
        if not self.request.params.guesses or not step.guesses:
            return not step.guesses
        right = [one.token for one in step.guesses[: step.accepted]]
        return (
            len(step.guesses) == step.verified
            and right == list(step.tokens[: step.accepted])
            and all(
                one.token < vocab_size and 0.0 <= one.chance <= 1.0 and len(one.drafter) <= MAX_NAME
                for one in step.guesses
            )
        )

    def ends(self, reason: FinishReason) -> bool:
        """Returns whether a sound verifier may end the output here with that reason."""
        if reason is FinishReason.STOP:
            return bool(self.steps) and self.log[-1] in self.request.params.stop_token_ids
        return reason is FinishReason.LENGTH and self.is_full

    @property
    def reached(self) -> FinishReason | None:
        """Returns the end that was told, or the end that the last token makes, even if nobody told it."""
        if self.end is not None:
            return self.end
        return next((one for one in (FinishReason.STOP, FinishReason.LENGTH) if self.ends(one)), None)

    @property
    def length(self) -> int:
        """Returns the number of records."""
        return 1 + self.steps + (self.end is not None)

    def records(self, start: int) -> Iterator[bytes]:
        """Yields the records from that one on."""
        if start == 0:
            yield self._request_record()
        for index in range(max(start - 1, 0), self.steps):
            step = self.step(index)
            yield step_record(
                step.tokens,
                step.accepted,
                step.verified,
                step.cached_prompt_tokens,
                step.numerics,
                step.logprobs,
                step.guesses,
                step.prompt,
                step.beside,
                step.own,
                step.drafters,
            )
        if self.end is not None and start < self.length:
            yield end_record(self.end)

    @property
    def size_bytes(self) -> int:
        """Returns about how many bytes of memory it takes."""
        tokens = len(self.request.params.prompt) + len(self.log)
        scored = len(self._logprobs) * LOGPROB_BYTES * (1 + (self.request.params.logprobs or 0))
        if self._prompt is not None:
            scored += 2 * TOKEN_BYTES * (len(self._prompt) + len(self._prompt.top))
        known = TOKEN_BYTES * tokens + STEP_BYTES * self.steps + scored + GUESS_BYTES * self._guessed
        known += OWN_BYTES * len(self._own) + DRAFTERS_BYTES * len(self._drafters)
        known += TOKEN_BYTES * len(self.request.params.prediction)
        return REQUEST_BYTES + len(self.answer) + known

    def _request_record(self) -> bytes:
        request = self.request
        return request_record(
            LoggedRequest(
                model=request.model,
                fingerprint=request.fingerprint or "",
                params=request.params,
                num_speculative_tokens=request.num_speculative_tokens,
                answer=self.answer,
                owner=request.owner,
            )
        )
