"""What becomes of an architecture's tiny random checkpoint when it is loaded and served."""

from __future__ import annotations

import logging
import random
import tempfile
import warnings
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from outrider.engine import recurrent_layers, self_check
from outrider.engine.loading import load_engine
from outrider.engine.model_class import auto_class
from outrider.errors import OutriderError
from tests.zoo.serving import keeps_bits, own_text, prompts, serve
from tests.zoo.shapes import VOCAB, tiny

NOISE = 0.1  # of numbers that a fresh model has all alike: norms, biases, corrections of routers
KV_BYTES = 2**26  # of which five recurrent states are a small part


class Outcome(Enum):
    EXACT = "served, bit-exact"
    NOT_EXACT = "served, not bit-exact"
    REFUSED = "refused"
    WRONG = "wrong"  # other text than the model's own, or a false claim of exactness
    UNTRIED = "not tried"  # no tiny model could be made of it here


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    architecture: str = ""
    reason: str = ""


def build(model_type: str, folder: Path, seed: int = 0) -> str:
    """Saves a random float32 model of this type to the folder; returns its class. Raises what transformers
    raises if that does not work."""
    torch.manual_seed(seed)
    config = tiny(model_type)
    model = (auto_class(config) or AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.randn(tensor.shape) * NOISE)
        model.eval()(input_ids=torch.arange(1, 9)[None], use_cache=False)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(folder)
    return type(model).__name__


def verdict(
    model_type: str, folder: Path, seed: int = 0, dtype: str = "float32", text: bool = True
) -> Verdict:
    """Builds, loads and serves the architecture. The folder is empty. `text`: whether to compare greedy text,
    in float32."""
    warnings.simplefilter("ignore")
    hf_logging.set_verbosity(hf_logging.CRITICAL)
    hf_logging.disable_progress_bar()
    try:
        architecture = build(model_type, folder, seed)
    except Exception as error:  # a class may ask for anything
        return Verdict(Outcome.UNTRIED, reason=_first_line(error))
    reasons = _Reasons()
    logging.getLogger(self_check.__name__).addHandler(reasons)
    try:
        engine = load_engine(str(folder), name=model_type, dtype=dtype, kv_memory_bytes=KV_BYTES)
    except OutriderError as error:
        return Verdict(Outcome.REFUSED, architecture, error.message.replace(f"{folder}", model_type))
    finally:
        logging.getLogger(self_check.__name__).removeHandler(reasons)
    if engine.info.bit_exact and not keeps_bits(engine, VOCAB):
        return Verdict(Outcome.WRONG, architecture, "it is called bit-exact, and is not")
    if text and dtype == "float32":
        loader = auto_class(AutoConfig.from_pretrained(folder))
        model = loader.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        recurrent_layers.as_published(model)
        texts = [(prompt, own_text(model, prompt)) for prompt in prompts(random.Random(seed), VOCAB)[1::2]]
        if not (serve(engine, texts, VOCAB).own and serve(engine, texts, VOCAB, drafting=False).own):
            return Verdict(Outcome.WRONG, architecture, "its greedy text is not that of its own code")
    if not engine.info.bit_exact:
        return Verdict(Outcome.NOT_EXACT, architecture, "; ".join(reasons.told))
    return Verdict(Outcome.EXACT, architecture)


def tried(model_type: str, seed: int, dtype: str) -> Verdict:
    """Returns the verdict, in a folder of its own; greedy text is compared with the first seed."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return verdict(model_type, Path(folder), seed, dtype, text=seed == 0)


class _Reasons(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
