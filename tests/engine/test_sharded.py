"""A model divided among real processes: its numbers, its steps, and what happens when one of them is lost."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from outrider.engine import assembly, loading
from outrider.engine import ranks as ranks_module
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.engine.parts import Parts
from outrider.engine.rank_group import RankGroup
from outrider.engine.ranks import Ranks
from outrider.engine.runner import CallByCall
from outrider.errors import ModelRefused, PeerLost, StartupError
from outrider.options.engine import EngineOptions
from outrider.options.telemetry import Logging
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row
from outrider.wire.hello import Role
from outrider.worker import followers
from outrider.worker.followers import FollowerProcesses, FollowerSpec, device_of
from outrider.worker.model import load
from tests.follower_pool import OPTIONS, Pool, divided
from tests.forked import Forked, parent
from tests.zoo.verdict import build

TWO = replace(OPTIONS, tensor_parallel_size=2)

VOCAB = 199
HYBRIDS = ("qwen3_next", "olmo_hybrid", "jamba")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    running = Pool()
    yield running
    running.close()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's; the followers keep the usual one."""
    monkeypatch.setattr(ranks_module, "PATIENCE", timedelta(seconds=2))


def logits_of(engine: Engine, tokens: list[int], chunks: list[int]) -> torch.Tensor:
    """[len(tokens), V], read in such chunks beside another session."""
    table, other, found = BlockTable(), BlockTable(), []
    for chunk in chunks:
        at = table.length
        engine.pool.extend(table, chunk)
        engine.pool.extend(other, 3)
        works = [
            Work(other.blocks, other.length - 3, [5, 6, 7], 2),
            Work(table.blocks, at, tokens[at : at + chunk], chunk),
        ]
        found.append(engine.step(works)[2:].clone())
    engine.pool.close(table)
    engine.pool.close(other)
    return torch.cat(found)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "olmo2"])
def test_logits_are_the_whole_models_and_keep_their_bits(
    arch: str, pool: Pool, checkpoint: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    """More than two ranks are in tests/exact/test_tensor_parallel.py."""
    tokens = [random.Random(1).randrange(VOCAB) for _ in range(90)]
    expected = logits_of(engine(arch), tokens, [90])
    with divided(checkpoint(arch), 2, pool.start) as parts:
        whole = logits_of(parts, tokens, [90])
        assert float((whole - expected).abs().max()) < 1e-4 * float(expected.abs().max())
        for chunks in ([1] * 12 + [78], [5] * 6 + [60], [9, 1, 64, 1, 1, 14]):
            assert torch.equal(logits_of(parts, tokens, chunks), whole), chunks


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_recurrent_states_are_whole_in_every_process(model_type: str, pool: Pool, tmp_path: Path) -> None:
    """And what transformers' plan divides gives the whole model's numbers, in any chunks."""
    build(model_type, tmp_path)
    tokens = [random.Random(1).randrange(VOCAB) for _ in range(90)]
    expected = logits_of(load_engine(str(tmp_path), kv_memory_bytes=2**24), tokens, [90])
    with divided(tmp_path, 2, pool.start) as parts:
        assert parts.info.bit_exact
        whole = logits_of(parts, tokens, [90])
        assert float((whole - expected).abs().max()) < 1e-4 * float(expected.abs().max())
        for chunks in ([1] * 12 + [78], [5] * 6 + [60], [9, 1, 64, 1, 1, 14]):
            assert torch.equal(logits_of(parts, tokens, chunks), whole), chunks


def test_followers_keep_the_states_that_their_leader_keeps(pool: Pool, tmp_path: Path) -> None:
    """By books of their own they would not know which sessions have ended, and give up one that waits."""
    build("qwen3_next", tmp_path)
    tokens = [random.Random(1).randrange(VOCAB) for _ in range(40)]
    with divided(tmp_path, 2, pool.start) as parts:
        whole, table, elsewhere = logits_of(parts, tokens, [40]), BlockTable(), BlockTable()
        parts.pool.extend(table, 30)
        parts.step([Work(table.blocks, 0, tokens[:30], 1)])
        for _ in range(2 * parts.attention.states.slots.slots):
            other = BlockTable()
            parts.pool.extend(other, 5)
            parts.step([Work(other.blocks, 0, tokens[:5], 1)])
            parts.pool.close(other)
            parts.pool.extend(elsewhere, 16)  # takes its block
        parts.pool.extend(table, 10)
        assert torch.equal(parts.step([Work(table.blocks, 30, tokens[30:], 10)]), whole[30:])


def test_the_kv_memory_is_that_of_all_together(
    pool: Pool, checkpoint: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    with divided(checkpoint("llama"), 2, pool.start) as parts:
        assert parts.pool.num_blocks == engine("llama").pool.num_blocks


def test_a_step_may_bring_no_rows_or_be_longer_than_a_message(
    pool: Pool, checkpoint: Callable[..., Path], engine: Callable[..., Engine]
) -> None:
    tokens = [random.Random(2).randrange(VOCAB) for _ in range(1000)]
    greedy = SamplingParams(temperature=0.0)
    found = []
    with divided(checkpoint("llama"), 2, pool.start) as parts:
        for running in (engine("llama"), parts):
            table = BlockTable()
            running.pool.extend(table, 999)
            assert running.choose(running.prepare([Work(table.blocks, 0, tokens[:999], 0)]), []) == []
            running.pool.extend(table, 1)
            work = Work(table.blocks, 999, tokens[999:], 1)
            found.append(
                running.choose(running.prepare([work]), [Row(greedy, 1000, None, ())], vocab_size=50)
            )
    assert found[0] == found[1] and found[0][0] < 50


def test_probes_come_between_steps(pool: Pool, checkpoint: Callable[..., Path]) -> None:
    with divided(checkpoint("llama"), 2, pool.start) as parts:
        tokens = [random.Random(3).randrange(VOCAB) for _ in range(30)]
        expected = logits_of(parts, tokens, [1] * 30)
        probes = threading.Thread(target=lambda: [parts.probe() for _ in range(30)])
        probes.start()
        assert torch.equal(logits_of(parts, tokens, [1] * 30), expected)
        probes.join()
        assert parts.pool.usage == 0


def group_of(engine: Engine) -> RankGroup:
    assert isinstance(engine.group, RankGroup)
    return engine.group


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Followers are forked, not started: see tests/forked.py."""

    def start(spec: FollowerSpec) -> Forked:
        module = ("outrider.worker.follower", str(parent().pid), spec.to_json())
        return parent().fork(module, os.environ)

    monkeypatch.setattr(followers, "_start", start)


def pids_of(engine: Engine) -> dict[int, int]:
    """The followers', by rank."""
    found = group_of(engine).ranks.followers
    assert isinstance(found, FollowerProcesses)
    return found.pids


def lost(engine: Engine) -> str:
    """The sentence with which an idle engine ends what it serves."""

    async def idle() -> None:
        await asyncio.Event().wait()

    async def serve() -> None:
        async with asyncio.timeout(120):
            await engine.serve(idle())

    with pytest.raises(PeerLost) as raised:
        asyncio.run(serve())
    return raised.value.message


def test_a_killed_follower_is_noticed_while_nothing_runs(
    forked: None, checkpoint: Callable[..., Path]
) -> None:
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    with divided(checkpoint("llama", **heads), 3, FollowerProcesses) as parts:
        pids = pids_of(parts)
        os.kill(pids[2], signal.SIGKILL)
        sentence = lost(parts)
        assert sentence == "follower 2 of the tensor-parallel group was killed by signal 9 (Killed)"
        for use in (parts.probe, lambda: parts.step([Work([0], 0, [1], 1)])):
            with pytest.raises(PeerLost, match="killed by signal 9"):
                use()
        assert not psutil.pid_exists(pids[1])


def test_a_follower_that_hangs_is_noticed(
    forked: None, short_patience: None, checkpoint: Callable[..., Path]
) -> None:
    with divided(checkpoint("llama"), 2, FollowerProcesses) as parts:
        (pid,) = pids_of(parts).values()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(PeerLost, match=r"one of the 2 processes .* ended or did not answer"):
            for _ in range(10**6):
                parts.probe()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(("module", "moment"), [(loading, "_model"), (assembly, "check")])
async def test_a_follower_that_is_killed_while_it_loads_is_no_fault_of_the_models(
    module: ModuleType,
    moment: str,
    forked: None,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[FollowerProcesses] = []
    at_that_moment = getattr(module, moment)

    def start(specs: Sequence[FollowerSpec]) -> FollowerProcesses:
        started.append(FollowerProcesses(specs))
        return started[0]

    def killing(*args: Any, **options: Any) -> Any:
        follower = psutil.Process(started[0].pids[1])
        follower.kill()
        return at_that_moment(*args, **options)

    monkeypatch.setattr(module, moment, killing)
    with pytest.raises(StartupError, match=r"follower 1 .* was killed by signal 9") as refusal:
        await load(Role.VERIFIER, str(checkpoint("llama")), "tiny", TWO, start)
    assert not isinstance(refusal.value, ModelRefused)


def test_a_probe_that_comes_after_the_last_step_is_refused_at_once(
    pool: Pool, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[PeerLost] = []
    with divided(checkpoint("llama"), 2, pool.start) as parts:
        leading, ranks = group_of(parts).leading, group_of(parts).ranks
        assert leading is not None
        send, leave = ranks.send, ranks.close

        def probe() -> None:
            with pytest.raises(PeerLost, match="has been left") as refusal:
                parts.probe()
            refused.append(refusal.value)

        probing = threading.Thread(target=probe)

        def last_word(message: torch.Tensor) -> None:
            send(message)
            monkeypatch.setattr(ranks, "send", send)
            probing.start()  # waits until the leader's last step is over

        def leaving() -> None:
            probing.join()
            leave()

        monkeypatch.setattr(ranks, "close", leaving)
        leading._closed.set()  # no more signs of life
        leading._beating.join()
        monkeypatch.setattr(ranks, "send", last_word)
    assert refused and pool.last == ["stopped"]


def test_a_step_that_fails_at_the_leader_is_the_groups_end(
    pool: Pool, checkpoint: Callable[..., Path]
) -> None:
    with divided(checkpoint("llama"), 2, pool.start) as parts:
        runner = parts.runner
        assert isinstance(runner, CallByCall)
        model, runner.model = runner.model, None
        with pytest.raises(PeerLost, match=r"a step failed at the leader \(TypeError\)"):
            parts.probe()
        runner.model = model
        with pytest.raises(PeerLost, match=r"a step failed at the leader \(TypeError\)"):
            parts.probe()
    assert pool.last == ["one of the 2 processes of the tensor-parallel group ended or did not answer"]


LEADER = """
import sys
from dataclasses import replace
from outrider.engine.loading import load_engine
from outrider.engine.parts import Parts
from outrider.engine.rank_group import RankGroup
from outrider.engine.ranks import Ranks
from outrider.options.engine import EngineOptions
from outrider.worker.followers import FollowerProcesses, FollowerSpec
ranks = Ranks.host(2)
options = EngineOptions(kv_memory="16MiB", threads=1)
ranks.followers = FollowerProcesses([FollowerSpec(replace(ranks.group, rank=1), sys.argv[1], options)])
engine = load_engine(sys.argv[1], kv_memory_bytes=2**24, threads=1, ranks=ranks)
print(ranks.followers.pids[1], flush=True)
for line in sys.stdin:
    engine.probe()
    print("probed", flush=True)
"""


def test_followers_end_with_their_leader(checkpoint: Callable[..., Path]) -> None:
    leader = parent().fork(("-c", LEADER, str(checkpoint("llama"))), os.environ)
    with leader.stdin, leader.stdout:
        follower = psutil.Process(int(leader.stdout.readline()))
        follower.send_signal(signal.SIGTERM)  # which it leaves to its leader
        for _ in range(5):
            print("probe", file=leader.stdin, flush=True)
            assert leader.stdout.readline() == "probed\n"
        leader.kill()
        follower.wait(20)


def test_a_refusal_ends_all_ranks(pool: Pool, checkpoint: Callable[..., Path]) -> None:
    refused = pytest.raises(ModelRefused, match=r"GPT2LMHeadModel .* cannot be divided among 3 processes")
    with refused, divided(checkpoint("gpt2"), 3, pool.start):
        pass
    assert len(pool.last) == 2 and all("cannot be divided among 3" in said for said in pool.last)


def test_a_damaged_configuration_is_a_sentence(
    pool: Pool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "damaged")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "nonsense"}))
    refused = pytest.raises(StartupError, match=r"the config\.json of damaged makes no model")
    with refused, divided(folder, 2, pool.start):
        pass
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    refused = pytest.raises(StartupError, match=r"lack model.layers.3.* \(9 missing in all\)")
    with refused, divided(folder, 2, pool.start):
        pass
    assert "9 missing in all" in pool.last[0]


def test_what_a_follower_cannot_do_is_said_by_the_leader(pool: Pool, checkpoint: Callable[..., Path]) -> None:
    refused = pytest.raises(StartupError, match="--device cuda:77: there are")
    with refused, divided(checkpoint("llama"), 2, pool.start, device="cuda:77"):
        pass


def test_a_follower_that_does_not_start_is_noticed(checkpoint: Callable[..., Path]) -> None:
    ranks = Ranks.host(2)
    gone = FollowerSpec(replace(ranks.group, rank=1, port=1), "", OPTIONS)
    ranks.followers = FollowerProcesses([gone])
    for process in psutil.Process().children():
        if process.pid in ranks.followers.pids.values():
            process.kill()
    with pytest.raises(PeerLost, match="follower 1 of the tensor-parallel group was killed by signal 9"):
        load_engine(str(checkpoint("llama")), threads=1, ranks=ranks)
    ranks.close()


async def test_a_worker_says_why_its_model_is_not_divided(checkpoint: Callable[..., Path]) -> None:
    folder = str(checkpoint("gpt2"))
    with pytest.raises(ModelRefused, match="transformers has no tensor-parallel plan for its layers"):
        await load(Role.VERIFIER, folder, "tiny", TWO)
    assert not [child for child in psutil.Process().children() if "follower" in child.cmdline()]


def test_a_ranks_device_follows_its_leaders() -> None:
    assert [device_of("cpu", rank) for rank in (0, 3)] == ["cpu", "cpu"]
    assert [device_of("cuda", rank) for rank in (0, 3)] == ["cuda:0", "cuda:3"]
    assert [device_of("cuda:2", rank) for rank in (0, 1)] == ["cuda:2", "cuda:3"]


def test_what_a_follower_is_told_survives_the_command_line() -> None:
    group = ranks_module.Place(1, 2, "::1", 5)
    spec = FollowerSpec(
        group, 'a "model" ü', EngineOptions("cuda:1", "bfloat16", "1TiB", 3), logging=Logging("info", "json")
    )
    assert FollowerSpec.from_json(spec.to_json()) == spec
    with_parts = replace(spec, parts=Parts(("varlen", "gathered"), "cuda-graphs", fused=True))
    assert FollowerSpec.from_json(with_parts.to_json()) == with_parts
