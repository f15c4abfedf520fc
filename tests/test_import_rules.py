"""Who may import what: the pure modules run where there is no training stack (control plane, simulator, tests)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rhyme_openrlhf

PACKAGE = Path(rhyme_openrlhf.__file__).parent
HEAVY = {"ray", "vllm", "torch", "deepspeed", "openrlhf"}
# Rooms that are pure as a whole, and single modules of rooms that are not. Those not built yet join when they are.
PURE_ROOMS = ("speculation", "latency", "scheduling", "simulation")
PURE_MODULES = (
    "settings/config.py",
    "api/launch/job_file.py",
    "api/launch/queueing.py",
    "api/launch/schema.py",
    "api/launch/spec.py",
    "api/launch/spec_command.py",
    "api/launch/spec_paths.py",
    "api/store/status.py",
    "cli/run_spec.py",
    "embedded/demo.py",
    "settings/options.py",
    "history/byte_planes.py",
    "history/cpu_share.py",
    "history/index.py",
    "history/index_store.py",
    "history/journal.py",
    "prompt_keys.py",
    "history/ranks.py",
    "history/record.py",
    "history/shard.py",
    "history/work_queue.py",
    "platform/nvidia.py",
    "telemetry/engine_samples.py",
    "telemetry/batches.py",
    "telemetry/control_connection.py",
    "telemetry/event_json.py",
    "telemetry/events.py",
    "telemetry/metrics.py",
    "telemetry/reporter.py",
    "telemetry/run_files.py",
    "run/memory_plan.py",
    "run/model_shape.py",
    "run/resources.py",
    "run/stage_watch.py",
    "verify/chi_square.py",
    "verify/histories.py",
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
    ("api.live",),
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
    ("api.settings", "api.store", "api.ingest", "api.read", "api.launch", "api.live", "api.demo")
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


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of everything a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", pure_files(), ids=module_name)
def test_a_pure_module_names_nothing_heavy(path: Path) -> None:
    assert imported(ast.parse(path.read_text(encoding="utf-8"))) & HEAVY == set()


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
    assert imported(ast.parse(source)) & HEAVY == {"ray", "vllm", "torch"}


def control_plane_files() -> list[Path]:
    files = [path for room in ("api", "webui") for path in sorted((PACKAGE / room).rglob("*.py"))]
    return [path for path in files if path.parent.name not in ("api", "webui") or path.name != "__init__.py"]


def room_of(module: str) -> str:
    """The room of a module of the control plane: `api.store` of `rhyme_openrlhf.api.store.models`; "" of others."""
    parts = module.split(".")
    return ".".join(parts[1:3]) if len(parts) > 2 and parts[1] in ("api", "webui") else ""


def rooms_imported(tree: ast.AST) -> set[str]:
    """Rooms of the control plane that a file imports from, inside functions and for types too."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {room for module in modules if (room := room_of(module))}


@pytest.mark.parametrize("path", control_plane_files(), ids=module_name)
def test_a_room_of_the_control_plane_imports_only_rooms_below_it(path: Path) -> None:
    level = {room: number for number, rooms in enumerate(CONTROL_PLANE) for room in rooms}
    mine = room_of(module_name(path))
    found = rooms_imported(ast.parse(path.read_text(encoding="utf-8"))) - {mine}
    assert {room for room in found if level[room] >= level[mine]} == set()
    if mine.startswith("webui."):
        assert found & {"api.routes", "api.demo"} == set()


@pytest.mark.parametrize("path", control_plane_files(), ids=module_name)
def test_only_what_answers_requests_knows_http(path: Path) -> None:
    if room_of(module_name(path)) in WITHOUT_HTTP:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert imported(tree) & HTTP == set()
        assert rooms_imported(tree) & {"api.http"} == set()


def test_the_scan_sees_every_way_to_a_room() -> None:
    source = (
        "import rhyme_openrlhf.api.http.problems\nfrom rhyme_openrlhf.api import app\n"
        "def f():\n    from rhyme_openrlhf.webui.pages import runs\n    from rhyme_openrlhf.telemetry import events\n"
    )
    assert rooms_imported(ast.parse(source)) == {"api.http", "api.app", "webui.pages"}
