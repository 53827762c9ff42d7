"""What is not read is named for what it is, with what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.engine.loading import load_engine
from outrider.errors import StartupError


@pytest.fixture
def folder(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint to be changed."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def refusal(model: Path) -> str:
    with pytest.raises(StartupError) as refused:
        load_engine(str(model))
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize("name", ["model.safetensors", "a.gguf"])
def test_a_pointer_of_git_lfs_is_called_that(name: str, folder: Path) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n")
    if name.endswith(".gguf"):
        (folder / "config.json").unlink()
    assert f"{name} is a pointer of Git LFS, not the file itself: git lfs pull" in refusal(folder)


def test_an_adapter_beside_a_model_is_not_passed_by(folder: Path) -> None:
    """transformers would merge it, if peft is there, and would not if it is missing."""
    (folder / "adapter_config.json").write_text("{}")
    assert "holds a model and an adapter (adapter_config.json): move that to a folder of its own" in refusal(
        folder
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("params.json", "weights in Mistral's own arrangement (params.json"),
        ("pytorch_model-00001-of-00002.bin", "as pickles (.bin), which could run code here"),
        ("pytorch_model.bin", "only safetensors and GGUF are read: convert them"),
        ("adapter_config.json", "an adapter, not a model: give the model that it is for"),
        ("consolidated.00.safetensors", "weights in Mistral's own arrangement"),
        ("model.onnx", "weights of another format"),
    ],
)
def test_other_formats_are_refused_with_what_to_do(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"")
    assert sentence in refusal(tmp_path)


def test_parts_of_weights_without_their_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    said = refusal(folder)
    assert "holds model-00001-of-00002.safetensors (1 such in all), and neither model.safetensors nor" in said
    told = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    assert "is incomplete: model-00002-of-00002.safetensors, which model.safetensors.index" in refusal(folder)
