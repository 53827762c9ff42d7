"""Protocol messages to plain data and back: what several streams share, and what a codec is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from operator import attrgetter
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from outrider.errors import InvalidRequest, TooLarge
from outrider.grammar import MAX_GRAMMAR_BYTES
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, drafter_pb2, verifier_pb2
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import MAX_NAME, Identity, Role, hello_to_wire
from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.session import (
    MAX_CACHE_SALT_BYTES,
    MAX_TENANT_BYTES,
    SESSION_ID_BYTES,
    FinishReason,
    SessionId,
    SessionParams,
)

_VERIFIER_LOAD = [field.name for field in fields(VerifierLoad)]  # the message's fields have the same names
_DRAFTER_LOAD = [field.name for field in fields(DrafterLoad)]
_DRAFTER_NUMBERS = [name for name in _DRAFTER_LOAD if name != "round_trips"]
_verifier_load, _drafter_numbers = attrgetter(*_VERIFIER_LOAD), attrgetter(*_DRAFTER_NUMBERS)

MAX_BYTES = 16 * 2**20  # of what trusted peers say: a session with its prompt, the commits of many
MOST_MEASURED = 2.0**32  # of a number that a worker measures: none is infinite, nor near it
SMALL_BYTES = 4096  # of what says little
MOST_FURTHER = 256  # commands of a message, besides the first
MAX_ALIASES = 64  # of a model

Plain = TypeVar("Plain")
Wire = TypeVar("Wire", bound=Message)


class Codec(Generic[Plain, Wire]):
    """One type of message as plain data: to bytes and back."""

    def __init__(
        self,
        message: type[Wire],
        to_wire: Callable[[Plain], Wire],
        from_wire: Callable[[Wire], Plain],
        max_bytes: int,
    ) -> None:
        """`max_bytes`: of a message that is read; more are refused before it is parsed, as it may grow
        hundredfold by that."""
        self._message = message
        self._to_wire = to_wire
        self._from_wire = from_wire
        self.max_bytes = max_bytes

    def to_bytes(self, plain: Plain) -> bytes:
        """Returns the same bytes for the same data."""
        return self._to_wire(plain).SerializeToString(deterministic=True)

    def from_bytes(self, raw: bytes) -> Plain:
        """Raises InvalidRequest if the bytes are no such message, and TooLarge if they are too many."""
        name = self._message.DESCRIPTOR.name
        if len(raw) > self.max_bytes:
            raise TooLarge(f"a {name} may have at most {self.max_bytes} bytes, not {len(raw)}")
        try:
            message = self._message.FromString(raw)
        except DecodeError:
            raise InvalidRequest(f"the bytes are no {name}") from None
        return self._from_wire(message)


def further_from_wire(further: Collection[Wire], from_wire: Callable[[Wire], Plain]) -> tuple[Plain, ...]:
    """Returns the commands that follow the first one of a message. Raises InvalidRequest if they are more
    than are written together: they are obeyed in one turn of the event loop."""
    if len(further) > MOST_FURTHER:
        raise InvalidRequest(f"{len(further)} commands follow another; at most {MOST_FURTHER} may")
    return tuple(map(from_wire, further))


def session_id_from_wire(raw: bytes) -> SessionId:
    """Returns the session id. Raises InvalidRequest if its length is wrong."""
    if len(raw) != SESSION_ID_BYTES:
        raise InvalidRequest(
            f"session_id must be {SESSION_ID_BYTES} bytes, not {len(raw)}", field="session_id"
        )
    return SessionId(raw)


def finish_reason_from_wire(value: int) -> FinishReason:
    """Returns the reason. Raises InvalidRequest if it is none that is known here."""
    try:
        return FinishReason(value)
    except ValueError:
        raise InvalidRequest(f"there is no finish reason {value}", field="reason") from None


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    """Logit biases are rounded to 32-bit floats; all else is kept exactly."""
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
    )


def sampling_from_wire(message: common_pb2.SamplingParams) -> SamplingParams:
    """Returns parameters that are not validated: the receiver calls `validate` with its own vocabulary
    size."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=dict(message.logit_bias),
        seed=message.seed,
    )


def params_to_wire(params: SessionParams) -> common_pb2.SessionParams:
    return common_pb2.SessionParams(
        prompt=params.prompt,
        sampling=sampling_to_wire(params.sampling),
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        cache_salt=params.cache_salt,
        logprobs=params.logprobs,
        grammar=params.grammar,
        guesses=params.guesses,
        min_tokens=params.min_tokens,
        priority=params.priority,
        tenant=params.tenant,
        prompt_logprobs=params.prompt_logprobs,
        prediction=params.prediction,
    )


def params_from_wire(message: common_pb2.SessionParams) -> SessionParams:
    """Returns parameters that are not validated: the receiver knows its limits. Raises InvalidRequest if the
    salt is too long, the tenant or the grammar."""
    if len(message.cache_salt) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest(
            f"cache_salt must be at most {MAX_CACHE_SALT_BYTES} bytes, not {len(message.cache_salt)}",
            field="cache_salt",
        )
    if len(message.tenant) > MAX_TENANT_BYTES:
        raise InvalidRequest(f"tenant must be at most {MAX_TENANT_BYTES} bytes", field="tenant")
    if len(message.grammar) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"grammar must be at most {MAX_GRAMMAR_BYTES} bytes", field="grammar")
    return SessionParams(
        prompt=tuple(message.prompt),
        sampling=sampling_from_wire(message.sampling),
        max_tokens=message.max_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        cache_salt=message.cache_salt,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        grammar=message.grammar,
        guesses=message.guesses,
        min_tokens=message.min_tokens,
        priority=message.priority,
        tenant=message.tenant,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        prediction=message.prediction,
    )


def tokenizer_to_wire(files: TokenizerFiles) -> common_pb2.Tokenizer:
    return common_pb2.Tokenizer(
        hash=files.hash,
        json=files.json,
        chat_template=files.chat_template,
        special_tokens=files.special_tokens,
    )


def tokenizer_from_wire(message: common_pb2.Tokenizer) -> TokenizerFiles:
    return TokenizerFiles(message.hash, message.json, message.chat_template, dict(message.special_tokens))


def model_info_to_wire(model: ModelInfo) -> common_pb2.ModelInfo:
    return common_pb2.ModelInfo(
        name=model.name,
        fingerprint=model.fingerprint,
        architecture=model.architecture,
        parameters=model.parameters,
        vocab_size=model.vocab_size,
        max_context=model.max_context,
        eos_token_ids=model.eos_token_ids,
        device=model.device,
        dtype=model.dtype,
        bit_exact=model.bit_exact,
        tensor_parallel_size=model.tensor_parallel_size,
        quantization=model.quantization,
        numerics=model.numerics,
        aliases=model.aliases,
    )


def model_info_from_wire(message: common_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        fingerprint=message.fingerprint,
        architecture=message.architecture,
        parameters=message.parameters,
        vocab_size=message.vocab_size,
        max_context=message.max_context,
        eos_token_ids=tuple(message.eos_token_ids),
        device=message.device,
        dtype=message.dtype,
        bit_exact=message.bit_exact,
        tensor_parallel_size=message.tensor_parallel_size,
        quantization=message.quantization,
        numerics=message.numerics,
        aliases=tuple(message.aliases),
    )


def worker_info_to_wire(info: WorkerInfo) -> common_pb2.WorkerInfo:
    return common_pb2.WorkerInfo(
        hello=hello_to_wire(info.identity.hello()),
        model=model_info_to_wire(info.model),
        kv_blocks=info.kv_blocks,
        kv_block_size=info.kv_block_size,
    )


def worker_info_from_wire(message: common_pb2.WorkerInfo) -> WorkerInfo:
    """Returns the worker's description. Raises InvalidRequest if its role is no worker's; check the hello
    first."""
    hello = message.hello
    if int(hello.role) not in (Role.VERIFIER, Role.DRAFTER):
        raise InvalidRequest("role must be ROLE_VERIFIER or ROLE_DRAFTER for a worker", field="role")
    identity = Identity(
        Role(hello.role), hello.worker_id, hello.incarnation, hello.model_fingerprint, hello.tokenizer_hash
    )
    return WorkerInfo(identity, model_info_from_wire(message.model), message.kv_blocks, message.kv_block_size)


def check_named(info: WorkerInfo, *addresses: str) -> None:
    """Raises InvalidRequest unless what a worker is called, and its model, is printable and not long: it
    stands in logs, and routers remember by it what they saw."""
    who, model = info.identity, info.model
    told = (
        who.worker_id,
        who.model_fingerprint,
        who.tokenizer_hash,
        model.name,
        model.fingerprint,
        model.architecture,
        model.device,
        model.dtype,
        model.quantization,
        model.numerics,
        *model.aliases,
        *addresses,
    )
    if not "".join(told).isprintable():
        raise InvalidRequest("the worker's and its model's names and hashes must be printable characters")
    if max(map(len, told)) > MAX_NAME or len(model.aliases) > MAX_ALIASES:
        raise InvalidRequest(
            f"the worker's and its model's names, hashes and addresses have at most {MAX_NAME} characters "
            f"each, and it has at most {MAX_ALIASES} aliases"
        )


def verifier_load_to_wire(load: VerifierLoad) -> verifier_pb2.VerifierLoad:
    return verifier_pb2.VerifierLoad(**{name: getattr(load, name) for name in _VERIFIER_LOAD})


def verifier_load_from_wire(message: verifier_pb2.VerifierLoad) -> VerifierLoad:
    """Returns the load. Raises InvalidRequest if a number is none, or beyond all that can be measured: one
    such would spoil a histogram's sum for good."""
    numbers = _verifier_load(message)
    _check_measured(numbers)
    return VerifierLoad(*numbers)


def drafter_load_to_wire(load: DrafterLoad) -> drafter_pb2.DrafterLoad:
    return drafter_pb2.DrafterLoad(**{name: getattr(load, name) for name in _DRAFTER_LOAD})


def drafter_load_from_wire(message: drafter_pb2.DrafterLoad) -> DrafterLoad:
    """Returns the load. Raises InvalidRequest as verifier_load_from_wire does, and if an address is long."""
    numbers, round_trips = _drafter_numbers(message), dict(message.round_trips)  # a copy: it is not kept
    if max(map(len, round_trips), default=0) > MAX_NAME:
        raise InvalidRequest(f"a verifier's address has at most {MAX_NAME} characters", field="round_trips")
    _check_measured([*numbers, *round_trips.values()])
    return DrafterLoad(**dict(zip(_DRAFTER_NUMBERS, numbers, strict=True)), round_trips=round_trips)


def _check_measured(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, float) and not abs(value) <= MOST_MEASURED:  # nor is NaN
            raise InvalidRequest(f"a worker's load holds {value}: no such number can be measured")
