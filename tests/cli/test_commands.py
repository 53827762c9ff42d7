"""The command line as it is read: help, defaults, usage errors, and what each command starts."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from drafter.config import DrafterConfig
from outrider import __version__
from outrider.options.engine import EngineOptions
from outrider.options.option import options
from outrider.options.protection import Protection
from outrider.options.sessions import SessionOptions
from outrider.options.telemetry import Logging
from outrider_cli.app import app
from outrider_cli.children import Models, Workers, router_child, threads_each, worker_children
from outrider_cli.serve import reachable, router_addresses
from router.config import RouterConfig
from verifier.config import VerifierConfig

COMMANDS = {
    "serve",
    "generate",
    "router",
    "verifier",
    "drafter",
    "plan",
    "bench",
    "batch",
}  # and the group keys


def parameters(command: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in group.commands[command].params}


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-m", "outrider_cli", *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_what_every_command_line_has() -> None:
    version = CliRunner().invoke(app, ["--version"])
    assert (version.exit_code, version.output) == (0, f"outrider {__version__}\n")
    for asked in (["-h"], ["serve", "-h"]):
        shown = CliRunner().invoke(app, asked)
        assert shown.exit_code == 0 and "Usage: outrider" in shown.output.replace("root", "outrider")


def test_options_stand_under_headings() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"]).output
    headings = [line for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Options:" and len(headings) == len(set(headings)) > 5
    encryption = shown[shown.index("\nEncryption and access:") : shown.index("\nLogs and traces:")]
    assert "--tls-cert" in encryption and "--api-keys" in encryption and "--port" not in encryption


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_option_is_explained_and_shows_its_default(command: str) -> None:
    for name, parameter in parameters(command).items():
        assert parameter.help, f"{command} --{name} has no help text"
        if not parameter.required and not parameter.is_flag:
            assert parameter.default is not None or isinstance(parameter.show_default, str), (
                f"{command} --{name}"
            )
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    optional = [p for p in parameters(command).values() if not p.required and not p.is_flag]
    assert shown.output.count("[default:") == len(optional)


def test_help_loads_no_heavy_library() -> None:
    asked = [["--help"], *([command, "--help"] for command in sorted(COMMANDS))]
    program = (
        "import sys\nfrom outrider_cli import main\n"
        f"for arguments in {asked}:\n"
        "    sys.argv = ['outrider', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "    print(sorted({'torch', 'transformers', 'grpc', 'fastapi', 'numpy'} & sys.modules.keys()))"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=240
    )
    lines = run.stdout.splitlines()
    assert len([line for line in lines if line.startswith("Usage: outrider")]) == len(asked), run.stderr
    assert [line for line in lines if line.startswith("[")] == ["[]"] * len(asked)


@pytest.mark.parametrize(
    ("command", "config"),
    [("router", RouterConfig), ("verifier", VerifierConfig), ("drafter", DrafterConfig)],
)
def test_options_and_configuration_agree(command: str, config: Any) -> None:
    told = parameters(command)
    logging = {option.name: option.default for option in options(Logging)}  # of the process, whatever it runs
    assert {name: told.pop(name).default for name in logging} == logging
    fields = {option.name: option for option in options(config)}
    assert told.keys() == fields.keys()
    for name, option in fields.items():
        default = None if option.default is dataclasses.MISSING else option.default
        assert told[name].default == default, name


@pytest.mark.parametrize("option", ["num_speculative_tokens", "host", "port", "grpc_port", "seed"])
def test_serve_has_the_routers_defaults(option: str) -> None:
    assert parameters("serve")[option].default == parameters("router")[option].default


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--target", "x"],
            "--target is given without --draft: name a draft model, "
            "or say --propose suffix, or --drafters 0 for plain decoding",
        ),
        (["--draft", "x"], "--draft is given without --target: name both models of the pair"),
        (
            ["--draft", "x", "--target", "y", "--drafters", "0"],
            "--draft names a model but --drafters 0 runs none: leave one of them out",
        ),
    ],
)
def test_a_pair_that_is_none(arguments: list[str], sentence: str) -> None:
    run = CliRunner().invoke(app, ["serve", *arguments])
    assert (run.exit_code, run.output) == (2, f"outrider serve: {sentence}\n")


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (
            ["verifier", "--target", "x", "--router", "nowhere"],
            1,
            "outrider verifier: --router must be HOST:PORT",
        ),
        (
            ["drafter", "--draft", "x", "--router", "h:1", "--host", "0.0.0.0"],
            1,
            "outrider drafter: --host 0.0.0.0 listens on every address: say with --advertise",
        ),
        (
            ["drafter", "--draft", "x", "--router", "h:1", "--kv-memory", "much"],
            1,
            "outrider drafter: --kv-memory",
        ),
        (
            ["verifier", "--target", "x", "--router", "h:1", "--device", "tpu"],
            1,
            "outrider verifier: --device must",
        ),
        (
            ["verifier", "--target", "x"],
            1,
            "outrider verifier: say with --router or with --store where to register: one of them, not both",
        ),
        (
            ["drafter", "--draft", "x", "--router", "h:1", "--store", "redis://h"],
            1,
            "outrider drafter: --router and --store both say where to register: leave one of them out",
        ),
        (
            ["router", "--store", "http://h"],
            1,
            "outrider router: --store must begin with redis:// or rediss://",
        ),
        (
            ["router", "--host", "0.0.0.0"],
            1,
            "outrider router: --host 0.0.0.0 is reached from other machines: give --tls-cert, --tls-key and "
            "--tls-ca, or say --insecure",
        ),
        (
            ["drafter", "--draft", "x", "--router", "h:1", "--host", "10.0.0.1"],
            1,
            "outrider drafter: --host 10.0.0.1 is reached from other machines: give --tls-cert",
        ),
        (
            ["verifier", "--target", "x", "--store", "redis://:secret@10.0.0.1"],
            1,
            "outrider verifier: --store is on another machine and not encrypted",
        ),
        (
            ["verifier", "--target", "x", "--router", "h:1", "--tls-cert", "c", "--tls-key", "k"],
            1,
            "outrider verifier: --tls-ca is missing",
        ),
        (
            ["router", "--tls-ca", "f"],
            1,
            "outrider router: --tls-ca is given without --tls-cert and --tls-key",
        ),
        (["router", "--tls-cert", "f"], 1, "outrider router: --tls-cert is given without --tls-key"),
        (
            ["router", "--tls-cert", "nowhere.pem", "--tls-key", "k"],
            1,
            "outrider router: the TLS files cannot be used: nowhere.pem: no such file",
        ),
        (
            ["router", "--api-keys", "nowhere"],
            1,
            "outrider router: --api-keys nowhere: nowhere: no such file",
        ),
        (["drafter", "--router", "h:1"], 1, "outrider drafter: --draft is missing: name a draft model, or"),
        (
            ["drafter", "--draft", "x", "--propose", "suffix", "--router", "h:1"],
            1,
            "outrider drafter: --draft is for a draft model, which --propose suffix replaces: leave one out",
        ),
        (
            ["drafter", "--propose", "suffix", "--device", "cuda", "--router", "h:1"],
            1,
            "outrider drafter: --device is for a draft model, which --propose suffix replaces",
        ),
        (
            ["drafter", "--draft", "x", "--remember-answers", "1MiB", "--router", "h:1"],
            1,
            "outrider drafter: --remember-answers is for --propose suffix: leave it out with a draft model",
        ),
        (
            ["drafter", "--propose", "suffix", "--remember-answers", "lots", "--router", "h:1"],
            1,
            "outrider drafter: --remember-answers must be a size such as 512MiB or 2GiB, not 'lots'",
        ),
        (
            ["serve", "--drafters", "0", "--remember-answers", "1MiB"],
            2,
            "outrider serve: --remember-answers is for --propose suffix: leave it out",
        ),
        (
            ["serve", "--propose", "suffix", "--drafters", "0"],
            2,
            "outrider serve: --propose is of no use with --drafters 0: leave one out",
        ),
        (
            ["serve", "--propose", "suffix", "--draft-quantization", "int8"],
            2,
            "outrider serve: --draft-quantization is of no use with --propose: leave one out",
        ),
        (["router", "--port", "70000"], 2, "Error: Invalid value for '--port'"),
        (["serve", "--verifiers", "0"], 2, "Error: Invalid value for '--verifiers'"),
        (["verifier", "--router", "h:1"], 2, "Error: Missing option '--target'"),
        (["serve", "--frobnicate"], 2, "Error: No such option: --frobnicate"),
    ],
)
def test_a_bad_option_is_one_clear_line(
    arguments: list[str], code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a worker says there how many threads it takes
    run = CliRunner().invoke(app, arguments, prog_name="outrider")
    assert run.exit_code == code
    assert run.stderr.splitlines()[-1].startswith(line)
    assert run.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["router", "--store", "http://h"], 1, "outrider router: --store must begin with redis://"),
        (["serve", "--frobnicate"], 2, "Error: No such option: --frobnicate"),
    ],
)
def test_a_process_that_is_told_a_bad_option_ends_with_that_line(
    arguments: list[str], code: int, line: str
) -> None:
    run = outrider(*arguments)
    assert run.returncode == code
    assert run.stderr.splitlines()[-1].startswith(line)
    assert "Traceback" not in run.stderr
    assert run.stdout == ""


def test_serve_is_the_role_commands() -> None:
    """Every command line that serve makes is one that the roles understand."""
    engine = EngineOptions(device="cuda", dtype="float32", kv_memory="2GiB", threads=3)
    workers = Workers(verifiers=2, drafters=1, engine=engine, lock_step=True)
    router = RouterConfig(port=0, grpc_port=0, sessions=SessionOptions(5, seed=7, lock_step=True))
    models = Models("t", "d", "name")
    children = [router_child(models, router, Logging()), *worker_children(models, workers, "127.0.0.1:9")]
    assert [(child.name, child.restart) for child in children] == [
        ("router", False),
        ("verifier-1", True),
        ("verifier-2", True),
        ("drafter", True),
    ]
    group: Any = typer.main.get_command(app)
    for child in children:
        assert child.command[:4] == (sys.executable, "-m", "outrider_cli", child.role)
        command = group.commands[child.role]
        values = command.make_context(child.role, list(child.command[4:])).params
        assert child.drain_seconds == values.get("drain_seconds", 0)
        if child.role == "router":
            assert (values["num_speculative_tokens"], values["seed"], values["port"]) == (5, 7, 0)
        else:
            assert (values["router"], values["device"], values["threads"]) == ("127.0.0.1:9", "cuda", 3)
            assert values["kv_memory"] == "2GiB"
            assert values["dtype"] == "float32"
        assert values.get("lock_step", True)
        assert not values.get("branches", False)
    assert children[1].command == children[2].command


def test_serve_hands_its_protection_on() -> None:
    """All of it to the router; to workers, which are on this machine, what they show one another."""
    cert, key, ca, keys = (Path(name) for name in ("cert", "key", "ca", "keys"))
    for authority in (ca, None):
        protection, logging = Protection(cert, key, authority, True), Logging("debug")
        workers = Workers(verifiers=1, drafters=1, protection=protection, logging=logging)
        config = RouterConfig("h", worker_port=9, protection=protection, api_keys=keys)
        router = router_child(Models("t", "d", "n"), config, logging)
        values = {
            child.role: typer.main.get_command(app)  # type: ignore[attr-defined]
            .commands[child.role]
            .make_context(child.role, list(child.command[4:]))
            .params
            for child in (router, *worker_children(Models("t", "d", "n"), workers, "127.0.0.1:9"))
        }
        told = values["router"]
        assert (told["tls_cert"], told["tls_key"], told["tls_ca"]) == (cert, key, authority)
        assert (told["api_keys"], told["worker_port"], told["insecure"]) == (keys, 9, True)
        for role in ("verifier", "drafter"):
            shown = (values[role]["tls_cert"], values[role]["tls_key"], values[role]["tls_ca"])
            assert shown == ((cert, key, ca) if authority else (None, None, None))
            assert not values[role]["insecure"]
        assert {told["log_level"] for told in values.values()} == {"debug"}


def test_plain_decoding_runs_no_drafter() -> None:
    workers = Workers(verifiers=1, drafters=0)
    assert [child.name for child in worker_children(Models("t", None, "t"), workers, "h:1")] == ["verifier"]


def test_drafters_that_look_up_are_told_nothing_of_a_model() -> None:
    engine = EngineOptions(device="cuda", dtype="bfloat16")
    workers = Workers(verifiers=1, drafters=2, engine=engine, remember_answers="64MiB")
    _, *drafters = worker_children(Models("t", None, "t", "suffix"), workers, "127.0.0.1:9")
    assert [child.name for child in drafters] == ["drafter-1", "drafter-2"]
    command: Any = typer.main.get_command(app).commands["drafter"]  # type: ignore[attr-defined]
    for child in drafters:
        values = command.make_context("drafter", list(child.command[4:])).params
        assert (values["propose"], values["draft"], values["device"]) == ("suffix", None, "cpu")
        assert values["remember_answers"] == "64MiB"


@pytest.mark.parametrize(("cores", "workers", "each"), [(8, 2, 4), (2, 2, 1), (1, 3, 1), (7, 2, 3)])
def test_the_cores_are_divided(cores: int, workers: int, each: int) -> None:
    assert threads_each(cores, workers) == each


def test_what_a_router_says_is_understood() -> None:
    said = router_addresses("http://0.0.0.0:8000 (gRPC [::]:50051)")
    assert said == ("http://0.0.0.0:8000", "[::]:50051", "[::]:50051")
    assert [reachable(address) for address in said] == ["http://127.0.0.1:8000", *["[::1]:50051"] * 2]
    said = router_addresses("https://0.0.0.0:8000 (gRPC 0.0.0.0:50051, workers 0.0.0.0:50052)")
    here = ["https://127.0.0.1:8000", "127.0.0.1:50051", "127.0.0.1:50052"]
    assert [reachable(address) for address in said] == here
    assert reachable("10.0.0.0:80") == "10.0.0.0:80"


def test_a_worker_reads_its_threads_before_torch_is_loaded() -> None:
    """The number reaches torch by the environment, which torch reads when it is imported."""
    program = (
        "import sys\nfrom outrider_cli.roles import _claim_threads\n"
        "assert _claim_threads(1) == 1 and 'torch' not in sys.modules\n"
        "import torch; print(torch.get_num_threads())"
    )
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert run.stdout.strip() == "1", run.stderr


def test_serve_has_every_option_of_the_engine_and_hands_it_on() -> None:
    """Verifiers get the options as they are; a draft model is never divided."""
    engine = EngineOptions("cuda", "float16", "3GiB", 5, 2)
    assert {option.name for option in options(engine)} <= parameters("serve").keys()
    workers = Workers(verifiers=1, drafters=1, engine=engine)
    group: Any = typer.main.get_command(app)
    for child in worker_children(Models("t", "d", "n"), workers, "127.0.0.1:9"):
        told = group.commands[child.role].make_context(child.role, list(child.command[4:])).params
        own = engine if child.role == "verifier" else dataclasses.replace(engine, tensor_parallel_size=1)
        assert {option.name: told[option.name] for option in options(own)} == dataclasses.asdict(own)
