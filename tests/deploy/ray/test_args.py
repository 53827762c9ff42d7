"""The application's arguments: what is taken, and the sentence for what is not."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.args import nested, parse
from outrider.errors import StartupError


def test_a_command_line_and_a_file_say_the_same() -> None:
    said = parse({"target": "T", "draft": "D", "verifier.max_replicas": "4", "drafter.gpus": "0.5"})
    written = parse({"target": "T", "draft": "D", "verifier": {"max_replicas": 4}, "drafter": {"gpus": 0.5}})
    assert said == written
    assert (said.verifier.max_replicas, said.drafter.gpus) == (4, 0.5)


def test_settings_of_one_pool_may_come_in_both_ways() -> None:
    given = {"drafter.labels": {"pool": "draft"}, "drafter": {"cpus": 2}, "drafter.labels.zone": "a"}
    assert nested(given) == {"drafter": {"labels": {"pool": "draft", "zone": "a"}, "cpus": 2}}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"targt": "T"}, "there is no argument targt; there is target, draft, propose"),
        ({"verifier": {"replicas": 2}}, "there is no argument verifier.replicas; there is min_replicas"),
        ({"router.cpu": 1}, "there is no argument router.cpu; there is replicas, cpus"),
        ({"draft": "D"}, "draft is given without target: name both models of the pair"),
        (
            {"verifier.resting_threads": 4, "verifier.device": "cuda"},
            "verifier.resting_threads: is for a model on a CPU in one process: leave it out",
        ),
        (
            {"verifier.speculator": "S", "verifier.device": "cuda"},
            "verifier.speculator: is for a model on a CPU in one process: leave it out",
        ),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: must be at least 0, not -1"),
        ({"drafters_per_session": 5}, "drafters_per_session: must be from 1 to 4, not 5"),
        ({"propose": "luck"}, "propose: must be one of suffix, not 'luck'"),
        (
            {"propose": "suffix", "drafter.device": "cuda"},
            "drafter.device: is for a draft model, which --propose suffix replaces: leave one out",
        ),
        ({"target": ""}, "target: String should have at least 1 character"),
        (
            {"verifier.max_replicas": 0},
            "verifier.max_replicas: Input should be greater than or equal to 1, not 0",
        ),
        (
            {"drafter.device": "cuda", "drafter.gpus": 0.5},
            "drafter: gpus of 0.5 lets others share the GPU: say with kv_memory how much",
        ),
        ({"verifier.max_replicas": "many"}, "verifier.max_replicas: Input should be a valid integer"),
        ({"drafter.min_replicas": 3}, "drafter: max_replicas must be at least min_replicas, which is 3"),
        (
            {"drafter.max_batch_tokens": 9},
            "drafter.max_batch_tokens: must be at least 256, the prefill chunk",
        ),
        (
            {"autoscaling.look_back_seconds": 2},
            "autoscaling.look_back_seconds: Input should be greater than 10, not 2",
        ),
        ({"drafter.device": "gpu"}, "drafter.device: must be cpu or cuda"),
        ({"verifier.dtype": "int8"}, "verifier.dtype: must be one of float32, bfloat16, float16, not 'int8'"),
        (
            {"verifier.kv_memory": "much"},
            "verifier.kv_memory: must be a size such as 512MiB or 2GiB or a share such as 60%, not 'much'",
        ),
        ({"store": "http://:secret@host"}, "store: must be redis://HOST:PORT or rediss://HOST:PORT"),
        ({"seed": -1}, "seed: must be from 0 to 18446744073709551615, not -1"),
        ({"verifier": 3}, "verifier: Input should be a valid dictionary"),
        ({"verifier.cpus": 1, "verifier": {"cpus": 2}}, "verifier is given twice"),
        ({"verifier": 1, "verifier.cpus": 2}, "verifier.cpus does not go together with verifier"),
    ],
)
def test_a_wrong_argument_is_refused_with_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(StartupError) as raised:
        parse(given)
    assert raised.value.message.startswith(sentence)
    assert "\n" not in raised.value.message
    assert "secret" not in raised.value.message
