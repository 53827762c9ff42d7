"""The laws of the house: which room may import which, what the router never loads, what is generated."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "outrider",
    "outrider_cli",
    "router",
    "verifier",
    "drafter",
    "distillation",
    "demo",
    "deploy",
    "benchmarks",
}
MAY_IMPORT = {
    "outrider": set(),
    "router": {"outrider"},
    "verifier": {"outrider"},
    "drafter": {"outrider"},
    "distillation": {"outrider"},
    "demo": {"outrider", "distillation"},
    "outrider_cli": {"outrider", "router", "verifier", "drafter", "distillation", "demo"},
    "deploy": {"outrider", "router", "verifier", "drafter", "demo"},
    "benchmarks": ROOMS,
}
HEAVY = ("torch", "transformers", "safetensors", "verifier", "drafter")
WALL_CLOCK = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|\bdate\.today\b")
TELLS_PEOPLE_THE_TIME = {  # by the wall clock, which may jump: nothing is decided by it
    "outrider/telemetry/otlp.py",
    "outrider/telemetry/otlp_metrics.py",
    "outrider_cli/display.py",
    "outrider_cli/doctor_command.py",
    "router/api/grpc_generation.py",
    "router/api/http.py",
    "router/chat_template.py",
    "router/fleet.py",
}
LONGEST_FILE = 400  # lines
FIELD = re.compile(r"^\s+(?:optional |repeated )?(map<.+>|[\w.]+) (\w+) = \d+;\s*(//.*)?$")


def sources(*rooms: str) -> list[Path]:
    return [
        path
        for room in rooms
        for path in sorted((ROOT / room).rglob("*.py"))
        if not path.is_relative_to(ROOT / "outrider" / "v1")
    ]


def imported_rooms(source: str) -> Iterator[tuple[str, int]]:
    """(room, line) of every import of a room, inside functions as well."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            assert node.level == 0, "imports name their room: no relative imports"
        for name in names:
            room = name.partition(".")[0]
            if room in ROOMS:
                yield room, getattr(node, "lineno", 0)


def breaches(path: str, source: str) -> list[str]:
    """Imports of `source` that the direction of the rooms forbids."""
    own = path.partition("/")[0]
    found = []
    for room, line in imported_rooms(source):
        if room != own and room not in MAY_IMPORT[own]:
            found.append(f"{path}:{line} imports {room}")
    return found


def test_imports_run_one_way() -> None:
    files = sources(*MAY_IMPORT)
    assert len(files) > 30, "the rooms were not found"
    found = [
        breach for path in files for breach in breaches(path.relative_to(ROOT).as_posix(), path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    ("path", "source", "allowed"),
    [
        ("router/a.py", "from outrider.errors import OutriderError", True),
        ("router/a.py", "import router.load", True),
        ("router/a.py", "import verifier.session", False),
        ("drafter/a.py", "def f():\n    from verifier import session", False),
        ("verifier/a.py", "from drafter.session import x", False),
        ("outrider/a.py", "def f():\n    import router", False),
        ("outrider_cli/a.py", "import router.service", True),
        ("router/a.py", "import outrider_cli.serve", False),
        ("deploy/a.py", "def f():\n    import outrider_cli", False),
    ],
)
def test_the_check_of_imports_can_fail(path: str, source: str, allowed: bool) -> None:
    assert (breaches(path, source) == []) == allowed


# Who knows wire types: the codecs, and a client of the public API.
CODECS = re.compile(r"outrider/wire/\w+\.py|router/api/generation_wire\.py|benchmarks/router_host\.py")


def knows_wire_types(source: str) -> bool:
    """True if it imports generated messages or stubs, inside functions as well."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return any(f"{name}.".startswith("outrider.v1.") for name in names)


def test_wire_types_stop_at_the_codecs() -> None:
    files = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sources(*MAY_IMPORT)}
    found = {path for path, source in files.items() if knows_wire_types(source)}
    assert found, "the codecs were not found"
    assert [path for path in sorted(found) if not CODECS.fullmatch(path)] == []


@pytest.mark.parametrize(
    ("source", "knows"),
    [
        ("from outrider.v1 import verifier_pb2", True),
        ("def f():\n    from outrider.v1.verifier_pb2 import Draft", True),
        ("import outrider.v1.common_pb2", True),
        ("from outrider import v1", True),
        ("from outrider.wire.speculation import Draft", False),
    ],
)
def test_the_check_of_wire_types_can_fail(source: str, knows: bool) -> None:
    assert knows_wire_types(source) == knows


def named_import(node: ast.AST) -> str | None:
    """Returns the module that a call of import_module names."""
    match node:
        case ast.Call(func=ast.Name(id="import_module"), args=[ast.Constant(value=str(name)), *_]):
            return name
    return None


def imports_of_modules() -> dict[str, set[str]]:
    """The modules that each of them imports, inside functions and for type checkers alone as well."""
    found = {}
    for path in sources(*ROOMS):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        names = {f"{node.module}.{alias.name}" for node in froms for alias in node.names}
        names |= {node.module or "" for node in froms}
        names |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {text for node in nodes if (text := named_import(node)) is not None}
        found[".".join(path.relative_to(ROOT).with_suffix("").parts)] = names
    return {module: names & found.keys() for module, names in found.items()}


def test_no_imports_run_in_a_circle() -> None:
    graph = imports_of_modules()
    assert "outrider.engine.attention" in graph["outrider.engine.paged_attention"]
    assert "outrider.telemetry.otlp" in graph["outrider.telemetry.tracing"]  # inside a function
    assert named_import(ast.parse("import_module('a.b')", mode="eval").body) == "a.b"
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_router_loads_no_model_code() -> None:
    """Every module of the room, in a process of its own."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources("router")]
    program = (
        f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert "router.service" in modules
    assert run.stdout.strip() == "[]", run.stderr


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *outputs, *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    fresh = {path.name: path.read_bytes() for path in (tmp_path / "outrider" / "v1").iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / "outrider" / "v1").glob("*.py*")}
    assert kept.pop("__init__.py") is not None
    assert kept.keys() == fresh.keys(), "run `make proto`, and remove what belongs to no .proto"
    stale = [name for name in sorted(fresh) if fresh[name] != kept[name]]
    assert stale == [], "stale: run `make proto`"


def test_proto_is_no_package() -> None:
    """A package named proto would shadow the one that other libraries install."""
    assert list((ROOT / "proto").rglob("*.py")) == []


def test_every_field_of_the_protocol_is_explained() -> None:
    """A field is explained by a comment of its own, by one on a field of the same name, or by one above its
    message type."""
    lines = [
        line for path in sorted((ROOT / "proto").rglob("*.proto")) for line in path.read_text().splitlines()
    ]
    explained: set[str] = set()
    fields: list[tuple[str, str]] = []  # (type, name)
    for before, line in zip(["", *lines], lines, strict=False):
        commented = before.lstrip().startswith("//")
        declared = re.match(r"(?:message|enum) (\w+)", line)
        if declared and commented:
            explained.add(declared[1])
        field = FIELD.match(line)
        if field:
            fields.append((field[1], field[2]))
            if field[3] or commented:
                explained.add(field[2])
    assert len(fields) > 100, "the fields were not found"
    assert [f"{kind} {name}" for kind, name in fields if not {kind, name} & explained] == []


def test_no_file_is_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in sources(*MAY_IMPORT, "tests")}
    assert [f"{path}: {length} lines" for path, length in lengths.items() if length > LONGEST_FILE] == []


def test_tests_are_no_package() -> None:
    """An __init__.py under tests/ would hide the real packages of the same names."""
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_nothing_is_decided_by_the_wall_clock() -> None:
    rooms = ("outrider", "router", "verifier", "drafter", "outrider_cli", "deploy")
    found = {str(path.relative_to(ROOT)) for path in sources(*rooms) if WALL_CLOCK.search(path.read_text())}
    assert found == TELLS_PEOPLE_THE_TIME


def test_no_function_within_another_calls_itself() -> None:
    """It would be in a cycle with what it closes over, a request's bytes for instance: these would stay until
    the collector comes, which counts objects, not bytes."""
    found = [
        f"{path.relative_to(ROOT)}:{inner.lineno}"
        for path in sources("outrider", "router", "verifier", "drafter", "deploy")
        for outer in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
        if inner is not outer and isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)
        if any(isinstance(node, ast.Name) and node.id == inner.name for node in ast.walk(inner))
    ]
    assert found == []
