"""A speculator at its target: what it reads, what it guesses, and which checkpoints are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.engine import speculator
from outrider.engine.engine import Engine, Work
from outrider.engine.loading import load_engine
from outrider.engine.speculator import CONFIG, WEIGHTS, Shape, Speculator, save
from outrider.engine.turning import Turn
from outrider.errors import StartupError
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row
from tests.tiny_models import build

HIDDEN, COUNT = 64, 150
IDS = list(range(COUNT))
PROMPT = [7, 150, 9, 30, 31]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture
def made(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    save(Speculator(Shape(HIDDEN, 96, COUNT)), IDS, tmp_path / "made")
    return tmp_path / "made"


def loaded(model: Path, quantization: str | None = None) -> Engine:
    return load_engine(str(model), name="m", kv_memory_bytes=4 * 2**20, threads=1, quantization=quantization)


def guessed(
    engine: Engine, places: list[int], sampling: SamplingParams = GREEDY, least: float = 0.0
) -> list[list[int]]:
    """Runs a step, and returns what is guessed behind token 5 at these of its rows."""
    engine.step([Work([0], 0, PROMPT, 3)])
    rows = [[Row(sampling, 9 + ahead, None, ())] * len(places) for ahead in range(3)]
    found = engine.guess(places, [5] * len(places), rows, least)
    assert all(0 < one.shares[0] <= 1 for each in found for one in each)
    return [[one.ids[0] for one in each] for each in found]


def test_it_guesses_no_more_where_nothing_is_likely(model: Path, made: Path) -> None:
    engine = loaded(model)
    engine.speculating = speculator.load(made, engine.model)
    (unsure,) = guessed(engine, [0], least=0.1)
    (sure,) = guessed(engine, [0], SamplingParams(temperature=0.0, logit_bias={20: 100.0}), least=0.1)
    assert len(unsure) == 1 and sure == [20] * 3


def test_it_guesses_as_its_network_does_alone_and_in_company(model: Path, made: Path) -> None:
    engine = loaded(model)
    engine.speculating = speculator.load(made, engine.model)
    assert guessed(engine, [0, 2]) == guessed(engine, [0]) + guessed(engine, [2])
    states = engine.speculating._last.states
    assert states.shape == (3, HIDDEN)
    network = Speculator(Shape(HIDDEN, 96, COUNT))
    weights = speculator.load_file(made / WEIGHTS)
    network.load_state_dict({name: value.float() for name, value in weights.items()})
    with torch.inference_mode():
        own, token, expected = network.begin(states[2:]), torch.tensor([5]), []
        for _ in range(3):
            own = network.follow(own, engine.model.get_input_embeddings().weight[token])
            token = network.logits(own).argmax(-1)
            expected.append(int(token))
    assert guessed(engine, [2]) == [expected]


def test_it_reads_the_same_of_a_turned_stream() -> None:
    torch.manual_seed(2)
    network, stream, norm = Speculator(Shape(HIDDEN, 96, COUNT)), Turn(HIDDEN), torch.rand(HIDDEN) + 0.1
    states, embedded = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)  # states before the last norm's weights
    with torch.inference_mode():
        plain = network.logits(network.follow(network.begin(states * norm), embedded))
    speculator.read_turned(network, stream, norm)
    with torch.inference_mode():
        turned = network.logits(network.follow(network.begin(stream.rows(states)), stream.rows(embedded)))
    assert torch.allclose(turned, plain, atol=1e-4)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2"])
def test_it_reads_what_the_output_layer_was_given(arch: str, made: Path, tmp_path: Path) -> None:
    """In 8 bits as well: what is turned, and what is not."""
    engine = loaded(build(arch, tmp_path / "target"), "int8")
    engine.speculating = speculator.load(made, engine.model)
    logits = engine.step([Work([0], 0, PROMPT, 3)])
    found = engine.model.get_output_embeddings()(engine.speculating._last.states)
    assert torch.allclose(found, logits, atol=1e-3)
    assert hasattr(engine.model, "turned") == (arch == "llama")


def no_number(folder: Path) -> None:
    weights = speculator.load_file(folder / WEIGHTS)
    weights["own.weight"][3, 4] = float("nan")
    save_file(weights, folder / WEIGHTS)


def test_a_target_whose_embeddings_have_another_size_has_none(made: Path, tmp_path: Path) -> None:
    engine = loaded(build("opt", tmp_path / "target", word_embed_proj_dim=32))
    with pytest.raises(StartupError, match="states of 64 numbers, and this one's have 32"):
        speculator.load(made, engine.model)


def damaged(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def change_config(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        change(config)
        (folder / CONFIG).write_text(json.dumps(config))

    return change_config


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "holds no config.json"),
        (lambda folder: (folder / CONFIG).write_text("{"), "config.json is damaged"),
        (damaged(lambda config: config.update(model_type="llama")), "a model of type llama, which is no"),
        (damaged(lambda config: config.pop("inner_size")), "config.json is damaged"),
        (damaged(lambda config: config.update(guesses=10**9)), "config.json is damaged"),
        (damaged(lambda config: config.update(hidden_size=2**40)), "states of 1099511627776 numbers"),
        (damaged(lambda config: config.update(inner_size=2**40)), "speculator.safetensors is missing or"),
        (damaged(lambda config: config.update(inner_size=2**63)), "config.json is damaged"),
        (damaged(lambda config: config.update(inner_size=95)), "size mismatch for gate_proj.weight"),
        (damaged(lambda config: config.update(vocabulary=7)), "lacks its draft_vocabulary.json"),
        (lambda folder: (folder / WEIGHTS).unlink(), "speculator.safetensors is missing or damaged"),
        (no_number, "damaged: it holds what is no number"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"x" * 99), "is missing or damaged"),
    ],
)
def test_what_is_damaged_or_another_targets_is_refused_in_one_sentence(
    model: Path, made: Path, harm: Callable[[Path], object], sentence: str
) -> None:
    harm(made)
    engine = loaded(model)
    with pytest.raises(StartupError, match=sentence) as error:
        speculator.load(made, engine.model)
    assert "\n" not in error.value.message
