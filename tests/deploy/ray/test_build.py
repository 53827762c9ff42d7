"""What Ray Serve is asked for: which deployments there are, and what each needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from deploy.app import (
    build,
    drafter_options,
    lookup_options,
    registry_options,
    router_options,
    verifier_options,
)
from deploy.args import models, parse
from deploy.autoscaling import DrafterPolicy, VerifierPolicy
from deploy.ingress import SERVICER_FUNCTIONS
from outrider.errors import StartupError

ROOT = Path(__file__).parents[3]


def deployments(application: Application) -> set[str]:
    """The names of an application's deployments: its own, and those that it is bound to."""
    bound = application._bound_deployment
    names = {bound.name}
    for argument in (*bound.init_args, *bound.init_kwargs.values()):
        if isinstance(argument, Application):
            names |= deployments(argument)
    return names


@pytest.mark.parametrize(
    ("args", "names"),
    [
        ({}, {"Router", "Verifier", "Drafter", "Registry"}),
        ({"store": "redis://10.0.0.1:6379/0", "insecure": True}, {"Router", "Verifier", "Drafter"}),
        ({"target": "T"}, {"Router", "Verifier", "Registry"}),
        ({"target": "T", "propose": "suffix"}, {"Router", "Verifier", "Drafter", "Registry"}),
        (
            {"target": "T", "draft": "D", "propose": "suffix"},
            {"Router", "Verifier", "Drafter", "Lookup", "Registry"},
        ),
        ({"target": "T", "draft": "D", "store": "rediss://host"}, {"Router", "Verifier", "Drafter"}),
    ],
)
def test_there_is_a_deployment_for_each_pool(args: dict[str, Any], names: set[str]) -> None:
    assert deployments(build(args)) == names


def test_a_store_that_is_not_encrypted_is_to_be_called_insecure() -> None:
    with pytest.raises(StartupError, match="--store is on another machine and not encrypted"):
        build({"store": "redis://10.0.0.1:6379/0"})


def test_wrong_arguments_end_the_build_with_a_sentence() -> None:
    with pytest.raises(StartupError, match="there is no argument verifer"):
        build({"verifer.max_replicas": 2})


def test_a_folder_is_named_as_every_node_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    assert models(parse({"target": "target", "draft": "org/draft"})) == (
        str(tmp_path / "target"),
        "org/draft",
        None,
    )
    target, draft, name = models(parse({"name": "mine"}))
    assert Path(target, "config.json").is_file()
    assert draft is not None and Path(draft, "config.json").is_file()
    assert name == "mine"
    target, draft, _ = models(parse({"propose": "suffix"}))
    assert Path(target, "config.json").is_file() and draft is None


def test_either_of_the_demo_pair_goes_with_another_model() -> None:
    target, draft, name = models(parse({"target": "outrider-demo", "draft": "org/draft"}))
    assert Path(target, "config.json").is_file() and (draft, name) == ("org/draft", "outrider-demo")
    target, draft, name = models(parse({"target": "org/big", "draft": "outrider-demo"}))
    assert draft is not None and Path(draft, "config.json").is_file() and (target, name) == ("org/big", None)


def test_what_guesses_beside_a_draft_model_is_one_where_the_drafters_are() -> None:
    both = {"target": "T", "draft": "D", "propose": "suffix", "drafter.labels": {"pool": "draft"}}
    told = parse({**both, "drafter.device": "cuda", "drafter.max_replicas": 4})
    options = lookup_options(told)
    assert options["num_replicas"] == 1
    assert options["ray_actor_options"] == {
        "num_cpus": 0.2,
        "num_gpus": 0,
        "label_selector": {"pool": "draft"},
    }
    router, _, _, drafter, lookup = build(both)._bound_deployment.init_args
    assert router.sessions.drafters_per_session == 2
    asked = [each._bound_deployment.init_args[:2] for each in (drafter, lookup)]
    assert asked == [("D", None), (None, "suffix")]
    router, *_ = build({**both, "drafters_per_session": 3})._bound_deployment.init_args
    assert router.sessions.drafters_per_session == 3
    router, *_ = build({"target": "T", "draft": "D"})._bound_deployment.init_args
    assert router.sessions.drafters_per_session == 1


def test_the_registry_runs_where_the_routers_do() -> None:
    told = parse({"router.labels": {"pool": "router"}})
    for options in (registry_options(told), router_options(told)):
        assert options["ray_actor_options"]["label_selector"] == {"pool": "router"}


def test_a_worker_of_one_process_is_an_actor_where_the_labels_say() -> None:
    args: dict[str, Any] = {"drafter.labels": {"pool": "draft"}}
    args |= {"drafter.device": "cuda", "drafter.gpus": 0.25, "drafter.kv_memory": "10%"}
    options = drafter_options(parse(args | {"drafter.resources": {"nic": 1}}))
    assert options["ray_actor_options"] == {
        "num_cpus": 0.5,
        "num_gpus": 0.25,
        "resources": {"nic": 1},
        "label_selector": {"pool": "draft"},
    }
    assert "placement_group_bundles" not in options


def test_a_divided_worker_is_a_group_of_bundles_on_one_node() -> None:
    args = {"tensor_parallel_size": 4, "device": "cuda", "cpus": 2, "labels": {"pool": "target"}}
    options = verifier_options(parse({"verifier": args}))
    assert options["ray_actor_options"] == {"num_cpus": 2, "num_gpus": 1}
    assert options["placement_group_bundles"] == [{"CPU": 2, "GPU": 1}] * 4
    assert options["placement_group_bundle_label_selector"] == [{"pool": "target"}] * 4
    assert options["placement_group_strategy"] == "STRICT_PACK"


def test_a_cpu_only_group_asks_for_no_gpu() -> None:
    options = verifier_options(parse({"verifier.tensor_parallel_size": 2}))
    assert options["placement_group_bundles"] == [{"CPU": 0.5}] * 2
    assert "placement_group_bundle_label_selector" not in options


def test_a_pool_of_one_size_is_not_scaled_and_another_by_our_policies() -> None:
    assert verifier_options(parse({"verifier": {"min_replicas": 3, "max_replicas": 3}}))["num_replicas"] == 3
    told = parse({"verifier.max_replicas": 4, "drafter.max_replicas": 2, "autoscaling.max_step_seconds": 0.2})
    verifiers = AutoscalingConfig(**verifier_options(told)["autoscaling_config"])
    assert (verifiers.min_replicas, verifiers.max_replicas) == (1, 4)
    assert verifiers.policy.get_policy() is VerifierPolicy
    assert verifiers.policy.policy_kwargs == {"max_step_seconds": 0.2}
    drafters = AutoscalingConfig(**drafter_options(told)["autoscaling_config"])
    assert drafters.policy.get_policy() is DrafterPolicy


def test_serve_gives_a_verifier_the_time_to_drain_and_never_refuses_before_the_router_does() -> None:
    told = parse({"verifier.drain_seconds": 60, "router.max_sessions": 10_000})
    assert verifier_options(told)["graceful_shutdown_timeout_s"] > 60
    options = router_options(told)
    assert options["max_ongoing_requests"] > 10_000
    assert "max_queued_requests" not in options, "Serve's own is: no limit"


@pytest.mark.parametrize(
    ("args", "warnings"),
    [
        ({"router.replicas": 2}, 1),
        ({"router.replicas": 1}, 0),
        ({"router.replicas": 2, "store": "redis://127.0.0.1:6379/0"}, 0),
    ],
)
def test_several_routers_without_a_redis_are_warned_of_in_one_line(
    args: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    build(args)
    said = [record.getMessage() for record in caplog.records if record.name == "deploy.app"]
    assert len(said) == warnings
    assert all("there are 2 routers and no Redis" in line and "\n" not in line for line in said)


def test_routers_are_told_how_long_a_stream_can_be_resumed() -> None:
    for args, seconds in (({}, 600), ({"router.session_ttl": 60}, 60)):
        options, *_ = build(args)._bound_deployment.init_args
        assert options.sessions.session_ttl == seconds
    with pytest.raises(StartupError, match=r"router\.session_ttl"):
        build({"router.session_ttl": 0})


def test_routers_share_prefixes_among_keys_only_if_they_are_told_to() -> None:
    for args, shared in (({}, False), ({"router.share_prefixes": True}, True)):
        options, *_ = build(args)._bound_deployment.init_args
        assert options.sessions.share_prefixes is shared


def test_the_config_file_asks_for_what_there_is() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "serve.yaml").read_text())
    assert config["grpc_options"]["grpc_servicer_functions"] == SERVICER_FUNCTIONS
    (application,) = config["applications"]
    assert application["import_path"] == "deploy.app:build"
    assert deployments(build(application["args"])) == {"Router", "Verifier", "Drafter", "Registry"}


def test_building_loads_no_model_code_and_switches_rays_reports_off() -> None:
    """The controller and the routers import this too."""
    program = (
        "import os, sys; from deploy.app import build; build({})\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules],"
        " os.environ['RAY_USAGE_STATS_ENABLED'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_USAGE_STATS_ENABLED"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[] 0", run.stderr


def test_without_ray_there_is_a_sentence(tmp_path: Path) -> None:
    hidden = "import os, sys; sys.modules['ray'] = None; from deploy.cluster import main; sys.exit(main("
    arguments = f"[{str(tmp_path)!r}, str(os.pipe()[0])]))"
    done = subprocess.run([sys.executable, "-c", hidden + arguments], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == (
        "outrider cluster: Ray is not installed: install outrider[ray], or use make cluster\n"
    )
