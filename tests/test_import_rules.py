"""Import rules: rooms import only rooms below, and pure modules run without a training stack."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

import pytest

import rhyme_openrlhf

PACKAGE = Path(rhyme_openrlhf.__file__).parent
HEAVY = {"ray", "vllm", "torch", "deepspeed", "openrlhf"}
# Rooms that are pure as a whole, and single modules of rooms that are not. Those not built yet join when they are.
PURE_ROOMS = ("settings", "latency", "drafting", "scheduling", "proof", "simulation")
PURE_MODULES = (
    "api/launch/job_file.py",
    "api/launch/queueing.py",
    "api/launch/schema.py",
    "api/launch/spec.py",
    "api/launch/spec_command.py",
    "api/launch/spec_paths.py",
    "api/store/status.py",
    "cli/run_spec.py",
    "embedded/demo.py",
    "platform/cpu_share.py",
    "history/index.py",
    "history/index_store.py",
    "history/journal.py",
    "pipeline/batch.py",
    "prompt_keys.py",
    "history/ranks.py",
    "history/record.py",
    "history/shard.py",
    "platform/nvidia.py",
    "telemetry/engine_events.py",
    "telemetry/batches.py",
    "telemetry/control_connection.py",
    "telemetry/events.py",
    "telemetry/metrics.py",
    "telemetry/reporter.py",
    "telemetry/run_directory.py",
    "telemetry/samples.py",
    "run/model_shape.py",
    "run/resources.py",
    "run/stage_watch.py",
    "verify/outcome.py",
    "verify/record.py",
    "verify/training_arguments.py",
)

# The control plane's rooms from bottom to top. A room imports rooms of lower lines; rooms of one line import none of
# each other. docs/control-plane.md draws it.
CONTROL_PLANE = (
    ("api.settings",),
    ("api.store",),
    ("api.ingest", "api.read", "api.launch"),
    ("api.live", "api.webhooks"),
    ("api.http",),
    ("api.access",),
    ("api.routes",),
    ("api.demo",),
    ("api.app",),
    ("webui.site",),
    ("webui.figures",),
    ("webui.new_run",),
    ("webui.run",),
    ("webui.pages",),
    ("webui.install",),
)
# Rooms that know nothing of HTTP: they raise plain exceptions, and routes make answers of them.
WITHOUT_HTTP = (
    ("api.settings", "api.store", "api.ingest", "api.read", "api.launch", "api.live", "api.webhooks", "api.demo")
    + ("webui.figures", "webui.new_run", "webui.run")
)  # fmt: skip
HTTP = {"fastapi", "sse_starlette", "starlette", "uvicorn"}


def pure_files() -> list[Path]:
    rooms = [path for room in PURE_ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
    # The control plane runs without the training stack; its one module that starts Ray jobs imports it when it does.
    rooms += [path for path in sorted((PACKAGE / "api").rglob("*.py")) if path.name != "ray_jobs.py"]
    rooms += sorted((PACKAGE / "webui").rglob("*.py"))
    return rooms + [path for name in PURE_MODULES if (path := PACKAGE / name).exists()]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Top-level names of everything a file imports, inside functions too."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@functools.cache
def statements(path: Path) -> list[ast.AST]:
    """Return a file's imports; several tests look at those of the same files."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def test_a_pure_module_names_nothing_heavy() -> None:
    found = {module_name(path): imported(statements(path)) & HEAVY for path in pure_files()}
    assert len(found) > 150
    assert {module: heavy for module, heavy in found.items() if heavy} == {}


@pytest.mark.usefixtures("starts_python")
def test_importing_the_pure_modules_loads_nothing_heavy() -> None:
    """Catches what the scan cannot see: a heavy import behind one of our own or a third party's modules."""
    modules = [module_name(path) for path in pure_files()]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(*sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_scan_sees_every_form_of_import() -> None:
    source = "import ray.util\ndef f():\n    from vllm.v1 import core\nif f:\n    import torch as t\n"
    assert imported(ast.walk(ast.parse(source))) & HEAVY == {"ray", "vllm", "torch"}


def control_plane_files() -> list[Path]:
    files = [path for room in ("api", "webui") for path in sorted((PACKAGE / room).rglob("*.py"))]
    return [path for path in files if path.parent.name not in ("api", "webui") or path.name != "__init__.py"]


def room_of(module: str) -> str:
    """The room of a module of the control plane: `api.store` of `rhyme_openrlhf.api.store.models`; "" of others."""
    parts = module.split(".")
    return ".".join(parts[1:3]) if len(parts) > 2 and parts[1] in ("api", "webui") else ""


def rooms_imported(nodes: Iterable[ast.AST]) -> set[str]:
    """Rooms of the control plane that a file imports from, inside functions and for types too."""
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {room for module in modules if (room := room_of(module))}


def test_rooms_of_the_control_plane_import_only_rooms_below_them() -> None:
    level = {room: number for number, rooms in enumerate(CONTROL_PLANE) for room in rooms}
    wrong: dict[str, set[str]] = {}
    files = control_plane_files()
    assert len(files) > 100
    for path in files:
        mine = room_of(module_name(path))
        found = rooms_imported(statements(path)) - {mine}
        wrong[module_name(path)] = {room for room in found if level[room] >= level[mine]}
        if mine.startswith("webui."):
            wrong[module_name(path)] |= found & {"api.routes", "api.demo"}
    assert {module: rooms for module, rooms in wrong.items() if rooms} == {}


def test_only_what_answers_requests_knows_http() -> None:
    files = [path for path in control_plane_files() if room_of(module_name(path)) in WITHOUT_HTTP]
    assert {room_of(module_name(path)) for path in files} == set(WITHOUT_HTTP)
    nodes = {module_name(path): statements(path) for path in files}
    found = {module: imported(one) & HTTP | rooms_imported(one) & {"api.http"} for module, one in nodes.items()}
    assert {module: known for module, known in found.items() if known} == {}


def test_the_scan_sees_every_way_to_a_room() -> None:
    source = (
        "import rhyme_openrlhf.api.http.problems\nfrom rhyme_openrlhf.api import app\n"
        "def f():\n    from rhyme_openrlhf.webui.pages import runs\n    from rhyme_openrlhf.telemetry import events\n"
    )
    assert rooms_imported(ast.walk(ast.parse(source))) == {"api.http", "api.app", "webui.pages"}


# The rooms from bottom to top; the root's modules are below all of them. A room imports itself and what is below it.
# A folder of a room may have a line of its own ("engine/patches"); the longest line that fits a file counts.
ROOMS = (
    "settings",
    "platform",
    "embedded",
    "telemetry",
    "latency",
    "history",
    "drafting",
    "scheduling",
    "weights",
    "kv",
    "proof",
    "engine",
    "moves",
    "training",
    "pipeline",
    "run",
    "simulation",
    "verify",
    "client",
    "api",
    "webui",
    "cli",
)
# Imports that still go upwards: nothing may be added.
UPWARDS: set[tuple[str, str]] = set()


def room(path: str) -> int:
    """Return the place of a file's room in ROOMS, -1 for a module of the root."""
    above = [folder.as_posix() for folder in PurePosixPath(path).parents][:-1]
    if not above:
        return -1
    named = next((folder for folder in above if folder in ROOMS), None)
    assert named is not None, f"{path} is in no room of ROOMS"
    return ROOMS.index(named)


def own_imports(nodes: Iterable[ast.AST], modules: Mapping[str, str]) -> set[str]:
    """Return the files of the package that a file imports, inside functions too; `modules`: files by dotted names."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (below & set(modules)) or {node.module}
    return {modules[name] for name in names if name in modules}


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return what each file of the package imports of the package."""
    files = [path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts]
    # The links to the top-level folders are followed by name: rglob does not go through links.
    files += [path for link in ("api", "webui") for path in (PACKAGE / link).rglob("*.py")]
    files = sorted(set(files))
    names = {path: path.relative_to(PACKAGE).as_posix() for path in files}
    modules = {module_name(path): names[path] for path in files}
    return {names[path]: own_imports(statements(path), modules) for path in files}


def test_rooms_import_what_is_below_them(imports: dict[str, set[str]]) -> None:
    upwards = {(one, other) for one, others in imports.items() for other in others if room(other) > room(one)}
    assert upwards == UPWARDS


def test_files_import_each_other_in_no_circle(imports: dict[str, set[str]]) -> None:
    assert circles(imports) == []


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def circles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the largest sets of files of which each reaches each other one, in the order of their first names."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in graph}
    alike = {name: frozenset(other for other in found if name in reach[other]) for name, found in reach.items()}
    return sorted((set(one) for one in set(alike.values()) if len(one) > 1), key=min)
