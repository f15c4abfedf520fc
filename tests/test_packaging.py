"""The files that an installed wheel puts into place, and the versions that a machine gets."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    """Names of the files in it."""
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.usefixtures("starts_python")
def test_nothing_but_our_package_goes_to_site_packages(names: list[str]) -> None:
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"rhyme_openrlhf"}


def test_the_embedded_model_and_data_travel_along(names: list[str]) -> None:
    shipped = {name.removeprefix("rhyme_openrlhf/embedded/") for name in names}
    assert {"model/model.safetensors", "model/config.json", "model/tokenizer.json", "data/mixed_train.jsonl"} <= shipped
    assert {"reward.py", "demo.py"} <= shipped


def test_upstreams_options_travel_along(names: list[str]) -> None:
    assert "rhyme_openrlhf/settings/upstream_options.json" in names


def test_the_drafting_core_is_compiled_into_it_with_its_types_and_without_its_sources(names: list[str]) -> None:
    assert [name for name in names if name.startswith("rhyme_openrlhf/_drafting.cpython")]
    assert "rhyme_openrlhf/_drafting.pyi" in names and not [name for name in names if name.endswith((".cpp", ".h"))]


@pytest.mark.usefixtures("starts_python")
def test_without_a_compiler_all_but_the_core_is_installed(tmp_path: Path) -> None:
    """Builds a copy of the sources, because a build in the source tree reuses old objects."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.safetensors")
    for folder in ("rhyme_openrlhf", "csrc"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for file in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    none = {"CC": "no-such-compiler", "CXX": "no-such-compiler"}
    done = subprocess.run(
        [*command, str(tree)], capture_output=True, text=True, timeout=120, env={**os.environ, **none}
    )
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(built).namelist()
    assert "rhyme_openrlhf/drafting_core.py" in names and not [name for name in names if name.endswith(".so")]


def test_the_control_plane_and_its_migrations_are_real_packages_in_it(names: list[str]) -> None:
    """`rhyme_openrlhf/api` and `rhyme_openrlhf/migrations` are links in the source tree."""
    for folder in ("api", "migrations"):
        source = {f"rhyme_openrlhf/{folder}/{p.relative_to(ROOT / folder)}" for p in (ROOT / folder).rglob("*.py")}
        assert source and source <= set(names)
    assert {"rhyme_openrlhf/migrations/env.py", "rhyme_openrlhf/migrations/script.py.mako"} <= set(names)


def test_the_dashboard_travels_along_with_its_templates_and_static_files(names: list[str]) -> None:
    files = {path.relative_to(ROOT) for path in (ROOT / "webui").rglob("*") if path.is_file()}
    source = {f"rhyme_openrlhf/{path}" for path in files if "__pycache__" not in path.parts}
    assert source <= set(names)
    assert {path.suffix for path in files} >= {".css", ".html", ".js", ".py"}


@pytest.mark.usefixtures("starts_python")
def test_an_installed_wheel_makes_its_database(wheel: Path, tmp_path: Path) -> None:
    """Alembic finds its scripts where pip puts them, without the source tree."""
    pytest.importorskip("alembic")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    program = (
        "import rhyme_openrlhf.api.store.database as d; "
        f"s = d.Database('sqlite:///{tmp_path}/a.db'); s.upgrade(); print(d.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site"))
    assert (tmp_path / "a.db").stat().st_size > 0


def test_the_type_marker_and_the_licence_are_there(names: list[str]) -> None:
    assert "rhyme_openrlhf/py.typed" in names
    assert any(name.endswith("LICENSE") for name in names)


def test_our_tests_are_ours() -> None:
    """OpenRLHF's wheel installs a package named `tests`; ours must run, not that one."""
    assert Path(__file__).is_relative_to(ROOT)
    spec = importlib.util.find_spec("tests")
    if spec is not None and spec.origin is not None:
        assert "test_packaging" not in spec.origin


def test_pinned_versions_go_with_the_python_of_debian_12() -> None:
    lines = (ROOT / "requirements" / "constraints-cpu.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {one.name: one for one in importlib.metadata.distributions()}
    # What is installed in another version says nothing of the pinned one.
    known = [versions[pin.name] for pin in pins if pin.name in versions and versions[pin.name].version in pin.specifier]
    assert len(known) > len(pins) / 2
    wanted = {one.name: one.metadata.get("Requires-Python") or "" for one in known}
    assert {name: python for name, python in wanted.items() if "3.11.2" not in SpecifierSet(python)} == {}
