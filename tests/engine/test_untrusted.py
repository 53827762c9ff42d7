"""What a checkpoint or a process of a group could bring along: no code of theirs is run, no pickle read."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import distributed_c10d

from outrider.engine.checkpoint import Checkpoint, look_over
from outrider.engine.engine import Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import _eos_token_ids, load_engine
from outrider.errors import StartupError
from tests.follower_pool import Pool, divided

CheckpointOf = Callable[..., Path]


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.fixture
def copy(checkpoint: CheckpointOf, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    running = Pool()
    yield running
    running.close()


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin"]
)
def test_pickles_in_a_folder_are_never_read(name: str, copy: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    (copy / name).write_bytes(pickle.dumps(Trap(sprung)))
    load_engine(str(copy), kv_memory_bytes=2**22)  # beside safetensors they do no harm
    (copy / "model.safetensors").unlink()
    with pytest.raises(StartupError, match=r"as pickles .* only safetensors and GGUF are read"):
        load_engine(str(copy))
    assert not sprung.exists()


@pytest.mark.parametrize("model_type", ["llama", "unheard-of"])
def test_a_checkpoints_own_code_is_never_run(model_type: str, copy: Path, tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    code = f"import pathlib; pathlib.Path({str(sprung)!r}).touch()\nclass Theirs: pass\n"
    (copy / "theirs.py").write_text(code)
    config = json.loads((copy / "config.json").read_text())
    theirs = {"AutoConfig": "theirs.Theirs", "AutoModelForCausalLM": "theirs.Theirs"}
    (copy / "config.json").write_text(json.dumps({**config, "model_type": model_type, "auto_map": theirs}))
    if model_type == "llama":
        load_engine(str(copy), kv_memory_bytes=2**22)  # transformers' own code for it is there
    else:
        with pytest.raises(StartupError, match="describes no model that transformers knows"):
            load_engine(str(copy))
    assert not sprung.exists()


def test_a_group_sends_no_pickles_and_listens_on_loopback_only(
    pool: Pool, checkpoint: CheckpointOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collectives of objects are how torch.distributed pickles; all ranks take part in one."""

    def no_objects(*_: object) -> None:
        raise AssertionError("a collective of objects")

    for name in ("_object_to_tensor", "_tensor_to_object"):
        monkeypatch.setattr(distributed_c10d, name, no_objects)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family is socket.AF_INET and not each.address.startswith("127.") for each in addresses):
            monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)  # it is not asked
    before = listeners()
    with divided(checkpoint("llama"), 2, pool.start) as parts:
        table = BlockTable()
        parts.pool.extend(table, 3)
        assert torch.isfinite(parts.step([Work(table.blocks, 0, [5, 6, 7], 1)])).all()
        own = listeners() - before
        assert own, "the leader has a meeting point"
        assert {address for address, _ in own} <= {"127.0.0.1", "::1"}


def listeners() -> set[tuple[str, int]]:
    """Returns the addresses on which this process and its followers listen."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", '{"num_hidden_layers": 2000000}', "more than 4096 layers"),
        ("config.json", '{"text_config": {"num_hidden_layers": 2000000}}', "more than 4096 layers"),
        ("config.json", '{"n_layer": 2000000}', "more than 4096 layers"),
        ("config.json", '{"llm_config": {"num_blocks": 2000000}}', "more than 4096 blocks"),
        ("config.json", "[" * 10**6, "no JSON"),
        ("model.safetensors.index.json", '{"weight_map": 7}', "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": {}}}', "weight_map"),
    ],
)
def test_a_file_that_is_none_is_told_in_a_sentence(copy: Path, name: str, content: str, said: str) -> None:
    (copy / "model.safetensors").rename(copy / "other.safetensors")
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "other.safetensors"}}')
    look_over(Checkpoint(copy))
    (copy / name).write_text(content)
    with pytest.raises(StartupError, match=said):
        look_over(Checkpoint(copy))


def test_a_model_far_larger_than_its_files_is_not_begun(copy: Path) -> None:
    """What the files lack is made up: a checkpoint of 300 KB could take all memory before it was refused."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 2**40}))
    with pytest.raises(
        StartupError, match=r"config.json asks for \d+ numbers, and the files hold \d+ at most"
    ):
        load_engine(str(copy), kv_memory_bytes=2**22)


@pytest.mark.parametrize("eos", [-1, 2**40, [3, -1], ["x"]])
def test_an_end_of_text_that_is_no_token_is_refused(eos: Any) -> None:
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=eos),
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(eos_token_id=2)),
    )
    with pytest.raises(StartupError, match="eos_token_id"):
        _eos_token_ids(model)
