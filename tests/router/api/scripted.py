"""What the API's tests stand on: small real tokenizers, and a session runner that replays events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace

from fastapi import FastAPI
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from outrider.errors import Overloaded, Superseded, Unavailable, UnknownModel, unknown_session
from outrider.wire.session import FinishReason, SessionId
from router.api.http import create_app
from router.api.intake import Intake
from router.metrics import Metrics
from router.requests import (
    GenerationRequest,
    Recalled,
    Resumption,
    ServedModel,
    SessionBegun,
    SessionEnded,
    SessionEvent,
    TokenizerFiles,
    TokensCommitted,
)

TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{- bos_token + message['role'] + ': ' + message['content'] + '\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "STOP there, said the fox; naïve café, 中文 and 😀👍🏽",
]
BOS, EOS = "<s>", "</s>"


def byte_level() -> Tokenizer:
    """GPT-2's kind: byte-level BPE, few merges, so that characters span tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("w→rd", special=False)])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's kind: a space is part of the word after it, unknown characters fall back to byte tokens."""
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz,;", "th", "the", "▁the", "▁fox", "ox", "▁th", "▁t", "▁f"]
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "t"),
        ("▁t", "h"),
        ("▁th", "e"),
        ("▁", "f"),
        ("o", "x"),
        ("▁f", "ox"),
    ]
    model = models.BPE(
        {piece: id for id, piece in enumerate(pieces)},
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([BOS, EOS])
    return tokenizer


def files(tokenizer: Tokenizer, template: str = TEMPLATE) -> TokenizerFiles:
    text = tokenizer.to_str()
    table = json.dumps(sorted(tokenizer.get_vocab().items()))
    return TokenizerFiles(str(hash(table)), text, template, {"bos_token": BOS, "eos_token": EOS})


def served(tokenizer: Tokenizer, name: str = "demo", max_context: int = 64) -> ServedModel:
    return ServedModel(
        name=name,
        fingerprint="f",
        vocab_size=tokenizer.get_vocab_size() + 4,  # padded, as checkpoints often are
        max_context=max_context,
        eos_token_ids=frozenset({tokenizer.token_to_id(EOS)}),
        tokenizer=files(tokenizer),
        created=1_700_000_000,
    )


def steps(ids: Sequence[int], width: int = 1) -> list[SessionEvent]:
    """A script: `width` tokens a step, of which all but the last were drafted; then the end."""
    events: list[SessionEvent] = []
    for start in range(0, len(ids), width):
        part = tuple(ids[start : start + width])
        cached = 3 if start == 0 else 0
        events.append(TokensCommitted(part, len(part) - 1, width - 1, cached))
    return [*events, SessionEnded(FinishReason.LENGTH)]


Script = Callable[[GenerationRequest], Sequence[SessionEvent | Exception | None]]


@dataclass
class Log:
    """What is known of a session, by all runners that share the logs."""

    recalled: Recalled
    events: list[SessionEvent] = field(default_factory=list)
    takes: int = 1  # how often the session was taken: the last one has it


Logs = dict[SessionId, Log]


class ScriptedRunner:
    """Replays what `script` makes of a request. A None there waits until `go_on` is set.

    `logs` may be shared with other runners, as routers share a store. `forgets`: a log lacks that many of the
    last events, as after the loss of a router that had not written them yet."""

    def __init__(
        self, model: ServedModel, script: Script, logs: Logs | None = None, forgets: int = 0
    ) -> None:
        self._model = model
        self._script = script
        self.logs: Logs = {} if logs is None else logs
        self._forgets = forgets
        self.is_ready = True
        self.is_full = False
        self.store_is_away = False
        self.requests: list[GenerationRequest] = []
        self.open = 0
        self.logged = asyncio.Event()  # cleared: no session has begun, as far as its log goes
        self.logged.set()
        self.cancelled: list[SessionId] = []
        self.kept: list[SessionId] = []
        self.waiting = asyncio.Event()  # a session has come to a None
        self.go_on = asyncio.Event()

    def model(self, name: str) -> ServedModel:
        if name not in ("", self._model.name):
            raise UnknownModel(f"model {name!r} is not served here", field="model")
        return self._model

    def models(self) -> list[ServedModel]:
        return [self._model]

    def ready(self) -> bool:
        return self.is_ready

    def check_room(self, owner: str, sessions: int = 1) -> None:
        if self.is_full:
            raise Overloaded("full", retry_after=7)

    def degraded(self) -> str:
        return "the store is away" if self.store_is_away else ""

    @contextmanager
    def together(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        self.kept = [one.session_id for one in requests if one.session_id is not None]
        try:
            yield
        finally:
            self.kept = []

    async def cancel(self, session_id: SessionId) -> None:
        self.cancelled.append(session_id)

    async def run(
        self, request: GenerationRequest, answer: bytes = b""
    ) -> AsyncGenerator[SessionEvent, None]:
        self.requests.append(request)
        log = Log(Recalled(request, answer))
        if request.session_id is not None:
            assert self.logs.setdefault(request.session_id, log) is log, "a session id was used twice"
        async with aclosing(self._go_on(log)) as events:
            async for event in events:
                yield event

    async def recall(self, session_id: SessionId) -> Recalled:
        if self.store_is_away:
            raise Unavailable("the store is away")
        if session_id not in self.logs:
            raise unknown_session()
        log = self.logs[session_id]
        tokens = sum(len(event.tokens) for event in log.events if isinstance(event, TokensCommitted))
        return replace(log.recalled, output_tokens=tokens)

    async def resume(
        self, session_id: SessionId, resumption: Resumption | None = None
    ) -> AsyncGenerator[SessionEvent, None]:
        await self.recall(session_id)
        log = self.logs[session_id]
        log.takes += 1
        del log.events[max(0, len(log.events) - self._forgets) :]
        told = list(log.events)
        if told and isinstance(told[-1], SessionEnded):
            yield SessionBegun(iter(_steps(told)), over=True)
            yield told[-1]
            return
        async with aclosing(self._go_on(log, told)) as events:
            async for event in events:
                yield event

    async def _go_on(self, log: Log, told: Sequence[SessionEvent] = ()) -> AsyncGenerator[SessionEvent, None]:
        self.open += 1
        mine = log.takes
        try:
            await self.logged.wait()
            yield SessionBegun(iter(known_steps) if (known_steps := _steps(told)) else ())
            known = sum(len(event.tokens) for event in log.events if isinstance(event, TokensCommitted))
            for event in self._script(log.recalled.request):
                if known and isinstance(event, TokensCommitted):
                    event, known = _beyond(event, known), max(0, known - len(event.tokens))
                    if not event.tokens:
                        continue
                elif known:
                    continue
                await asyncio.sleep(0)
                if log.takes != mine:
                    raise Superseded("the session goes on elsewhere")
                if event is None:
                    self.waiting.set()
                    await self.go_on.wait()
                elif isinstance(event, Exception):
                    raise event
                else:
                    log.events.append(event)
                    yield event
        finally:
            self.open -= 1


def _steps(told: Sequence[SessionEvent]) -> list[TokensCommitted]:
    return [event for event in told if isinstance(event, TokensCommitted)]


def _beyond(step: TokensCommitted, known: int) -> TokensCommitted:
    """The step without its first `known` tokens."""
    return TokensCommitted(step.tokens[known:], max(0, step.accepted - known), max(0, step.verified - known))


def application() -> FastAPI:
    """The API over a runner that answers every request with the same three tokens."""
    runner = ScriptedRunner(served(byte_level()), lambda request: steps([5, 6, 7]))
    return create_app(Intake(runner, lambda below: 0), Metrics())


async def until(condition: Callable[[], bool]) -> None:
    """Waits; the test's own timeout ends it where it never comes."""
    while not condition():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.005)
