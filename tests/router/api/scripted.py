"""What the API's tests stand on: small real tokenizers, and a session runner that replays events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence

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

from outrider.errors import UnknownModel
from outrider.wire.codec import SessionId
from router.requests import (
    FinishReason,
    GenerationRequest,
    ServedModel,
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


class ScriptedRunner:
    """Replays what `script` makes of a request. A None there waits until the session is closed."""

    def __init__(
        self,
        model: ServedModel,
        script: Callable[[GenerationRequest], Sequence[SessionEvent | Exception | None]],
    ) -> None:
        self._model = model
        self._script = script
        self.is_ready = True
        self.requests: list[GenerationRequest] = []
        self.open = 0
        self.cancelled: list[SessionId] = []
        self.waiting = asyncio.Event()  # a session has come to a None

    def model(self, name: str) -> ServedModel:
        if name not in ("", self._model.name):
            raise UnknownModel(f"model {name!r} is not served here", field="model")
        return self._model

    def models(self) -> list[ServedModel]:
        return [self._model]

    def ready(self) -> bool:
        return self.is_ready

    def cancel(self, session_id: SessionId) -> None:
        self.cancelled.append(session_id)

    async def run(self, request: GenerationRequest) -> AsyncGenerator[SessionEvent, None]:
        self.requests.append(request)
        self.open += 1
        try:
            for event in self._script(request):
                await asyncio.sleep(0)
                if event is None:
                    self.waiting.set()
                    await asyncio.Event().wait()
                elif isinstance(event, Exception):
                    raise event
                else:
                    yield event
        finally:
            self.open -= 1


async def until(condition: Callable[[], bool]) -> None:
    """Waits; the test's own timeout ends it where it never comes."""
    while not condition():  # noqa: ASYNC110 (what is waited for has no event)
        await asyncio.sleep(0.005)
