"""What a worker says about itself and its model: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.wire.hello import Identity
from outrider.wire.load import Load


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A complete tokenizer: whoever has this needs no model files to turn text into ids and back."""

    hash: str  # hex digest of the id -> token table
    json: str  # contents of a tokenizer.json
    chat_template: str  # Jinja; empty if there is none
    special_tokens: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a worker runs."""

    name: str  # under which clients ask for it
    fingerprint: str  # hex digest of configuration and weights
    architecture: str
    parameters: int
    vocab_size: int  # rows of logits; token ids are below it
    max_context: int  # most tokens of prompt and output together
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    bit_exact: bool  # a token's logits do not depend on its batch, chunking or drafts
    tensor_parallel_size: int = 1  # processes that the model is divided among
    quantization: str = (
        ""  # how its products are rounded: int8, or as its checkpoint says; empty = they are not
    )
    numerics: str = ""  # the same for engines that give the same logits to the bit; empty = not known
    aliases: tuple[str, ...] = ()  # other names under which clients may ask for it


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it registers."""

    identity: Identity
    model: ModelInfo
    kv_blocks: int
    kv_block_size: int  # tokens a block

    @property
    def max_context(self) -> int:
        """Most tokens of a session, prompt and output: the KV pool may hold fewer than the context."""
        return min(self.model.max_context, self.kv_blocks * self.kv_block_size)


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """A worker as the store has it."""

    info: WorkerInfo
    address: str  # host:port on which it serves its own RPCs
    load: Load | None = None  # as its role has it; None = not known yet
    join_address: str = ""  # host:port at which drafters that joined reach a verifier; empty = none do
