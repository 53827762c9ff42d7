"""A grown checkpoint computes its source's function, exactly as the docstring of demo.grow argues."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from demo.training.grow import (
    Shape,
    choose_shape,
    grow,
    largest_difference,
    main,
    parameter_count,
    parse_count,
    places,
)


def tiny(tied: bool = True, bias: bool = False) -> LlamaForCausalLM:
    """A random Llama of three layers; large weights make every block matter to the logits."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attention_bias=bias,
        mlp_bias=bias,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


IDS = torch.arange(80).reshape(2, 40) % 97


@pytest.mark.parametrize(("tied", "bias"), [(True, False), (False, False), (True, True)])
def test_logits_equal(tied: bool, bias: bool) -> None:
    source = tiny(tied, bias)
    assert largest_difference(source, grow(source, Shape(8, 160)), IDS) < 1e-4


def test_added_weights_are_random_and_a_broken_one_shows() -> None:
    source = tiny()
    grown = grow(source, Shape(8, 160))
    added = next(i for i in range(8) if i not in places(3, 8))
    layer = grown.model.layers[added]
    assert layer.self_attn.q_proj.weight.std() > 0.1
    assert grown.model.layers[0].mlp.gate_proj.weight[48:].std() > 0.1
    with torch.no_grad():
        layer.mlp.down_proj.weight.add_(0.05)
    assert largest_difference(source, grown, IDS) > 1e-2


def test_greedy_text_equal_after_reload(tmp_path: Path) -> None:
    source = tiny()
    grow(source, Shape(6, 96)).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.num_hidden_layers == 6 and loaded.config.intermediate_size == 96
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    prompt = IDS[:1, :7]
    assert torch.equal(source.generate(prompt, **options), loaded.generate(prompt, **options))


def test_shape_reaches_the_size_asked_for() -> None:
    source = tiny()
    for asked in (60_000, 200_000, 1_000_000):
        shape = choose_shape(source, asked)
        assert parameter_count(grow(source, shape)) == pytest.approx(asked, rel=0.25)
    assert parameter_count(grow(source, choose_shape(source, 1_000_000))) == pytest.approx(
        1_000_000, rel=0.05
    )


def test_refusals() -> None:
    source = tiny()
    with pytest.raises(ValueError, match="already has"):
        choose_shape(source, 100)
    with pytest.raises(ValueError, match="fewer than"):
        choose_shape(source, 1_000_000, layers=2)
    with pytest.raises(ValueError, match="not a number of parameters"):
        parse_count("many")
    assert parse_count("205M") == 205_000_000 and parse_count("1.2B") == 1_200_000_000


def test_command_line_grows_the_committed_target(models: Path, tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(
        app, ["--source", str(models / "target"), "--out", str(tmp_path), "--parameters", "12M"]
    )
    assert result.exit_code == 0, result.output
    grown = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert parameter_count(grown) == pytest.approx(12_000_000, rel=0.03)
    assert (tmp_path / "tokenizer.json").read_bytes() == (models / "target/tokenizer.json").read_bytes()
