"""`scripts/wheel_requirements.py` on wheels made here."""

import zipfile
from pathlib import Path
from types import ModuleType

import pytest

METADATA = """Metadata-Version: 2.1
Name: thing
Version: 1.0
Requires-Dist: torch==2.13.0+cpu; platform_system == "Linux"
Requires-Dist: torch==2.13.0; platform_system == "Darwin"
Requires-Dist: Flash_Attn==2.8.3
Requires-Dist: ray[default]==2.55.0
Requires-Dist: six; python_version < "3"
Requires-Dist: vllm==0.29.0; extra == "vllm"
Provides-Extra: vllm
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("thing/__init__.py", "")
        archive.writestr("thing-1.0.dist-info/METADATA", METADATA)
    return path


def test_what_holds_here_is_printed_without_markers_and_without_extras(script: ModuleType, wheel: Path) -> None:
    assert script.requirements(wheel) == ["torch==2.13.0+cpu", "Flash_Attn==2.8.3", "ray[default]==2.55.0"]


def test_names_left_out_are_compared_in_canonical_form(script: ModuleType, wheel: Path) -> None:
    assert script.requirements(wheel, without=["flash-attn", "TORCH"]) == ["ray[default]==2.55.0"]


def test_one_requirement_of_an_extra(script: ModuleType, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(wheel), "--extra", "vllm", "--only", "vllm"]) == 0
    assert capsys.readouterr().out == "vllm==0.29.0\n"


def test_nothing_left_prints_nothing(script: ModuleType, wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(wheel), "--without", "torch", "flash-attn", "ray"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("content", [None, b"no zip", "empty zip"])
def test_what_is_no_wheel_is_one_sentence(
    script: ModuleType, tmp_path: Path, content: bytes | str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.whl"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        zipfile.ZipFile(path, "w").close()
    assert script.main([str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("wheel_requirements: ") and str(path) in line


def test_asking_for_what_is_not_required_is_an_error(
    script: ModuleType, wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([str(wheel), "--only", "vllm"]) == 2
    assert "requires none of: vllm" in capsys.readouterr().err
