"""What a checkpoint's configuration says of its model: known before its weights are read."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from outrider.engine.checkpoint import Checkpoint, locate, look_over
from outrider.engine.gguf_file import complete
from outrider.engine.model_class import auto_class
from outrider.engine.sharding import check_divisible
from outrider.errors import StartupError
from outrider.options.model_id import checkpoint_name
from outrider.options.option import wrong

MOST_CONTEXT = 2**31 - 1  # whatever a configuration says: messages have room for no more


def check_asked(path_or_id: str, size: int, max_model_len: int | None) -> None:
    """Raises StartupError or ModelRefused where a model cannot be divided among so many ranks, or is asked to
    read longer texts than it can: before other processes start and weights are read."""
    checkpoint = locate(path_or_id)
    look_over(checkpoint)
    config = config_of(checkpoint)
    if size > 1:
        check_divisible(config, checkpoint_name(path_or_id), size)
    if max_model_len is not None and max_model_len > (most := max_context(config)):
        raise wrong("max_model_len", f"must be at most the model's {most}, not {max_model_len}")


def max_context(config: Any) -> int:
    """Returns the most tokens of a session.

    Kept to the length at which a rotary scaling that depends on the length switches over: its angles would
    otherwise change with what else is in the batch."""
    text = config.get_text_config()
    longest = min(int(getattr(text, "max_position_embeddings", None) or 2**20), MOST_CONTEXT)
    scaling = getattr(text, "rope_parameters", None) or {}
    by_kind = scaling.values() if all(isinstance(value, dict) for value in scaling.values()) else [scaling]
    for parameters in by_kind:
        original = parameters.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if parameters.get("rope_type") == "longrope" and original:
            longest = min(longest, int(original))
    return longest


def config_of(checkpoint: Checkpoint) -> Any:
    """Returns transformers' configuration. Raises StartupError."""
    where = checkpoint.gguf or "config.json"
    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False, **checkpoint.source)
        if checkpoint.gguf is not None:
            complete(config, checkpoint)
    except StartupError:
        raise
    except Exception as error:  # unknown types and damaged values raise all kinds
        reason = str(error).strip().split("\n")[0]
        raise StartupError(
            f"{checkpoint.folder / where} describes no model that transformers knows ({reason})"
        ) from None
    if auto_class(config) is None:
        raise StartupError(
            f"{checkpoint} holds a model of type {config.model_type}, which is not a causal language model"
        )
    return config
