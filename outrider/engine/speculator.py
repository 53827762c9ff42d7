"""A target's own guesses of its next tokens: a small network that reads the state of which the target drew a
token, and that token (Wertheimer et al., arXiv 2404.19124, call it an MLP speculator).

It has no attention and keeps nothing: what it guesses follows from the last step alone. So it costs no
memory a session, and nothing of it is lost where a session moves. Its own state takes the place of the
target's from the second guess on.

A checkpoint is a folder of `config.json`, `speculator.safetensors` and the ids that it guesses (see
draft_vocabulary.py). `outrider distill --speculator` makes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from outrider.engine import draft_vocabulary
from outrider.engine.linear_layers import EVEN_AND_OTHERS
from outrider.engine.native import library
from outrider.engine.native_layers import NativeLinear
from outrider.engine.native_speculator import NativeSpeculator
from outrider.engine.packed import PackedLinear, pack_linears
from outrider.engine.plain_pass import PlainPass
from outrider.engine.quantized import exact_here
from outrider.engine.turning import Turn
from outrider.errors import StartupError
from outrider.sampling.sampler import Ranked, Row, rank

CONFIG, WEIGHTS = "config.json", "speculator.safetensors"
KIND = "outrider_speculator"
MOST_GUESSES = 8  # tokens ahead
MOST_SIZE = 2**63 - 1  # of what a checkpoint tells: torch takes no greater number
LEAST_SURVIVAL = 0.1  # of a guess behind which another one is made
RANKED = 3  # tokens: a guess, and those that come next
CANDIDATES = (
    128  # tokens of a row, the likeliest: others win hardly ever, and noise for all of them takes time
)
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a speculator."""

    hidden_size: int  # H, its target's
    inner_size: int  # I
    vocabulary: int  # K ids that it guesses
    guesses: int = 3  # tokens ahead


class Speculator(nn.Module):
    """The network. Rows are [R, H] throughout; those of different sessions stand side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.inner_size
        self.shape = shape
        self.state = nn.Linear(width, width, bias=False)
        self.own = nn.Linear(width, width, bias=False)
        self.token = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)

    def begin(self, states: torch.Tensor) -> torch.Tensor:
        """Returns its own states. `states` are what the target's output layer was given."""
        found: torch.Tensor = self.state(states)
        return found

    def follow(self, own: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Returns its states after tokens, whose rows of the target's input embeddings are `embedded`."""
        x = self.own(normed(own)) + self.token(normed(embedded))
        y = normed(x)
        found: torch.Tensor = x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return found

    def logits(self, own: torch.Tensor) -> torch.Tensor:
        """Returns [R, K], of the token that follows."""
        found: torch.Tensor = self.head(normed(own))
        return found


def normed(x: torch.Tensor) -> torch.Tensor:
    """Returns rows of length sqrt(H). What such a norm usually multiplies them by is in the layer behind."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


class LastStates:
    """What a model's output layer was given in its last pass."""

    def __init__(self, model: Any) -> None:
        self._pass = vars(model).get("forward")
        if not isinstance(self._pass, PlainPass):
            self._given = torch.empty(0)
            model.get_output_embeddings().register_forward_pre_hook(self._note)

    def _note(self, _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        self._given = given[0][0]

    @property
    def states(self) -> torch.Tensor:
        """Returns [n, H], of the tokens whose logits were kept."""
        return self._pass.states if isinstance(self._pass, PlainPass) else self._given


class Speculating:
    """A speculator at its target."""

    def __init__(self, model: Any, speculator: Speculator, vocabulary: torch.Tensor) -> None:
        """`vocabulary` [K]: the ids that it guesses, rising. The speculator becomes what is fastest here."""
        self.guesses = speculator.shape.guesses
        self._last = LastStates(model)
        self._embeddings = model.get_input_embeddings()
        self._vocabulary, self._ranked = vocabulary, min(RANKED, len(vocabulary))
        turned = getattr(model, "turned", None)
        if turned is not None:
            read_turned(speculator, *turned)
        pack_linears(speculator, _fastest(), frozenset())
        self._speculator = speculator
        weight = self._embeddings.weight
        self._native: NativeSpeculator | None = None
        if NativeSpeculator.fits(speculator, weight):
            self._native = NativeSpeculator(speculator, weight, vocabulary, self._ranked, EPS)

    def guess(
        self,
        places: Sequence[int],
        tokens: Sequence[int],
        rows: Sequence[Sequence[Row]],
        least: float = LEAST_SURVIVAL,
    ) -> list[list[Ranked]]:
        """Returns for each of R tokens the guesses behind it, each with what came next in its draw; none
        behind those of which no row survives with `least` at least.

        `places`: the rows of the model's last pass from which the tokens were drawn. `rows`: for each guess
        in turn R rows, by which the target would draw it."""
        states = self._last.states[torch.tensor(places)]
        if self._native is not None and not any(row.params.biases for row in rows[0]):
            return self._native.guess(states, tokens, rows, least)
        return self._guess_by_torch(states, tokens, rows, least)

    def _guess_by_torch(
        self, states: torch.Tensor, tokens: Sequence[int], rows: Sequence[Sequence[Row]], least: float
    ) -> list[list[Ranked]]:
        found: list[list[Ranked]] = [[] for _ in tokens]
        survival, noisy = [1.0] * len(tokens), not all(row.params.greedy for row in rows[0])
        with torch.inference_mode(), _one_thread():
            own, last = self._speculator.begin(states.float()), torch.tensor(tokens)
            for drawn in rows:
                own = self._speculator.follow(own, F.embedding(last, self._embeddings.weight).float())
                logits, ids = self._speculator.logits(own), self._vocabulary
                if noisy and not any(row.params.biases for row in drawn):  # which may lift any
                    likely = torch.unique(logits.topk(min(CANDIDATES, len(ids))).indices)
                    logits, ids = logits[:, likely], ids[likely]
                ranked = rank(logits, drawn, self._ranked, None, ids)
                for row, one in enumerate(ranked):
                    found[row].append(one)
                    survival[row] *= one.shares[0]
                if max(survival) < least:
                    break
                last = torch.tensor([one.ids[0] for one in ranked])
        return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Its products are so small that to wake a second thread for each takes longer than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fastest() -> type[PackedLinear]:
    """Returns the linear layers of 8 bits, if there are any here: no text depends on what they round."""
    if exact_here():
        return EVEN_AND_OTHERS[library() is not None][1]
    return NativeLinear if library() else PackedLinear


@torch.no_grad()
def read_turned(speculator: Speculator, stream: Turn, norm: torch.Tensor) -> None:
    """Lets a speculator read what a target of a turned stream gives: see turning.py. `norm`: the weights of
    the target's last norm, which are in the layer behind it."""
    speculator.state.weight.copy_(stream.rows(speculator.state.weight * norm))
    speculator.token.weight.copy_(stream.rows(speculator.token.weight))


def save(speculator: Speculator, vocabulary: Sequence[int], folder: Path) -> None:
    """Writes a checkpoint, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": KIND, **asdict(speculator.shape)}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: value.detach().to(torch.bfloat16) for name, value in speculator.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    draft_vocabulary.write(folder, vocabulary)


def load(folder: Path, model: Any) -> Speculating:
    """Returns the speculator of a checkpoint, at its target.

    Raises StartupError, in one sentence, if there is none, or it is another target's."""
    embeddings = model.get_input_embeddings().weight
    sizes = (model.get_output_embeddings().in_features, embeddings.shape[1])
    return Speculating(model, *_read(folder, look_over(folder), sizes, len(embeddings)))


def look_over(folder: Path) -> Shape:
    """Returns the shape that a checkpoint tells. Raises StartupError."""
    file = folder / CONFIG
    if not file.is_file():
        raise StartupError(
            f"--speculator {folder} holds no {CONFIG}: `outrider distill --speculator` makes one"
        )
    try:
        known = json.loads(file.read_bytes())
        kind = known.pop("model_type", None)
        if kind != KIND:
            raise StartupError(
                f"--speculator {folder} holds a model of type {kind}, which is no speculator: give a draft "
                "model by --draft"
            )
        shape = Shape(**known)
        sizes = list(asdict(shape).values())
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise StartupError(f"{file} is damaged: distill the speculator again") from None
    if not all(type(size) is int and 0 < size <= MOST_SIZE for size in sizes) or shape.guesses > MOST_GUESSES:
        raise StartupError(f"{file} is damaged: distill the speculator again")
    return shape


def _read(
    folder: Path, shape: Shape, sizes: tuple[int, int], vocab_size: int
) -> tuple[Speculator, torch.Tensor]:
    """`sizes`: of the target's states and of its embeddings, both of which it reads."""
    if sizes != (shape.hidden_size, shape.hidden_size):
        raise StartupError(
            f"--speculator {folder} is of a target with states of {shape.hidden_size} numbers, and this "
            f"one's have {min(sizes)}: give that target's own"
        )
    vocabulary = draft_vocabulary.read(folder, vocab_size)
    if vocabulary is None or len(vocabulary) != shape.vocabulary:
        raise StartupError(f"{folder} lacks its {draft_vocabulary.FILE}: distill the speculator again")
    file = folder / WEIGHTS
    try:
        weights = load_file(file)
        with torch.device("meta"):
            speculator = Speculator(shape)
        floats = {name: value.float() for name, value in weights.items()}
        speculator.load_state_dict(floats, assign=True)
        if not all(bool(value.isfinite().all()) for value in floats.values()):
            raise RuntimeError("it holds what is no number")
    except (OSError, SafetensorError, RuntimeError, AttributeError) as error:
        fault = " ".join(str(error).split()).replace("Error(s) in loading state_dict for Speculator: ", "")
        raise StartupError(f"{file} is missing or damaged: {fault}") from None
    return speculator.eval().requires_grad_(False), vocabulary
