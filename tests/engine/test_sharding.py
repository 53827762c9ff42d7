"""Which models are divided among processes, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from outrider.engine.sharding import check_divisible
from outrider.errors import ModelRefused
from tests.tiny_models import BASE, CONFIGS


def config_of(arch: str, **overrides: Any) -> Any:
    model_type, special = CONFIGS.get(arch, (arch, {}))
    return AutoConfig.for_model(model_type, **{**BASE, **special, "vocab_size": 199, **overrides})


@pytest.mark.parametrize("arch", sorted(set(CONFIGS) - {"gpt2", "opt"}))
def test_these_are_divided(arch: str) -> None:
    check_divisible(config_of(arch), "tiny", 2)


@pytest.mark.parametrize(
    ("arch", "size", "overrides", "reason"),
    [
        ("gpt2", 2, {}, "transformers has no tensor-parallel plan for its layers"),
        ("opt", 2, {}, "transformers has no tensor-parallel plan for its layers"),
        ("gpt_oss", 2, {"num_local_experts": 4}, "transformers has no tensor-parallel plan for its layers"),
        ("mamba2", 2, {"num_heads": 8}, "transformers has no tensor-parallel plan for its layers"),
        ("llama", 2, {"num_key_value_heads": 1}, "it has 1 key-value heads"),
        ("llama", 4, {}, "it has 2 key-value heads"),
        ("qwen3", 3, {"num_key_value_heads": 3}, "it has 4 attention heads"),
    ],
)
def test_others_are_refused_by_what_they_lack(
    arch: str, size: int, overrides: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelRefused) as refused:
        check_divisible(config_of(arch, **overrides), "tiny", size)
    sentence = refused.value.message
    assert f"(tiny) cannot be divided among {size} processes: {reason}" in sentence
    assert sentence.endswith("change --tensor-parallel-size")


def test_a_plan_that_says_what_is_not_known_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("llama")
    plan = {**config.base_model_tp_plan, "layers.*.mlp.down_proj": "sequence_parallel"}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)
    with pytest.raises(ModelRefused, match="its tensor-parallel plan says sequence_parallel"):
        check_divisible(config, "tiny", 2)


def test_a_plan_that_divides_a_recurrent_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("qwen3_next")
    plan = {**config.base_model_tp_plan, "layers.*.linear_attn.in_proj_ba": "colwise"}
    monkeypatch.setattr(type(config), "base_model_tp_plan", plan)
    with pytest.raises(ModelRefused, match=r"divides model.layers.0.linear_attn.in_proj_ba, whose"):
        check_divisible(config, "tiny", 2)


def test_replicated_attention_is_divided_whatever_its_heads() -> None:
    check_divisible(config_of("olmo2", num_key_value_heads=1), "tiny", 2)
