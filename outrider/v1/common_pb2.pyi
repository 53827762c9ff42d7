from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_ROUTER: _ClassVar[Role]
    ROLE_VERIFIER: _ClassVar[Role]
    ROLE_DRAFTER: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_ROUTER: Role
ROLE_VERIFIER: Role
ROLE_DRAFTER: Role

class Hello(_message.Message):
    __slots__ = ("protocol_version", "role", "worker_id", "incarnation", "model_fingerprint", "tokenizer_hash")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: Role
    worker_id: str
    incarnation: int
    model_fingerprint: str
    tokenizer_hash: str
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "seed")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ...) -> None: ...

class SessionParams(_message.Message):
    __slots__ = ("prompt", "sampling", "max_tokens", "stop_token_ids", "cache_salt", "logprobs", "grammar", "guesses", "min_tokens", "prompt_logprobs", "priority", "tenant", "prediction")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    GUESSES_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    prompt: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    logprobs: int
    grammar: str
    guesses: bool
    min_tokens: int
    prompt_logprobs: int
    priority: int
    tenant: bytes
    prediction: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., guesses: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., tenant: _Optional[bytes] = ..., prediction: _Optional[_Iterable[int]] = ...) -> None: ...

class OwnCounts(_message.Message):
    __slots__ = ("predicted", "predicted_accepted", "forced", "forced_accepted", "speculated", "speculated_accepted")
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    FORCED_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SPECULATED_FIELD_NUMBER: _ClassVar[int]
    SPECULATED_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    predicted: int
    predicted_accepted: int
    forced: int
    forced_accepted: int
    speculated: int
    speculated_accepted: int
    def __init__(self, predicted: _Optional[int] = ..., predicted_accepted: _Optional[int] = ..., forced: _Optional[int] = ..., forced_accepted: _Optional[int] = ..., speculated: _Optional[int] = ..., speculated_accepted: _Optional[int] = ...) -> None: ...

class DrafterCounts(_message.Message):
    __slots__ = ("turn", "name", "verified", "accepted", "alone")
    TURN_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ALONE_FIELD_NUMBER: _ClassVar[int]
    turn: int
    name: str
    verified: int
    accepted: int
    alone: int
    def __init__(self, turn: _Optional[int] = ..., name: _Optional[str] = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ..., alone: _Optional[int] = ...) -> None: ...

class Guess(_message.Message):
    __slots__ = ("token", "chance", "drafter")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    CHANCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    token: int
    chance: float
    drafter: str
    def __init__(self, token: _Optional[int] = ..., chance: _Optional[float] = ..., drafter: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("logprobs", "ranks", "top_tokens", "top_logprobs")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "architecture", "parameters", "vocab_size", "max_context", "eos_token_ids", "device", "dtype", "bit_exact", "tensor_parallel_size", "quantization", "numerics", "aliases")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BIT_EXACT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    architecture: str
    parameters: int
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    device: str
    dtype: str
    bit_exact: bool
    tensor_parallel_size: int
    quantization: str
    numerics: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., architecture: _Optional[str] = ..., parameters: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., device: _Optional[str] = ..., dtype: _Optional[str] = ..., bit_exact: _Optional[bool] = ..., tensor_parallel_size: _Optional[int] = ..., quantization: _Optional[str] = ..., numerics: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("hello", "model", "kv_blocks", "kv_block_size")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    model: ModelInfo
    kv_blocks: int
    kv_block_size: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., kv_blocks: _Optional[int] = ..., kv_block_size: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Tokenizer(_message.Message):
    __slots__ = ("hash", "json", "chat_template", "special_tokens")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HASH_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hash: str
    json: str
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    def __init__(self, hash: _Optional[str] = ..., json: _Optional[str] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ...) -> None: ...
