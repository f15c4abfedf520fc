"""The GPU install, as far as a machine without a GPU allows: pip resolves it, and its steps come in a workable order.

flash-attn is compiled from source, and its setup needs nvcc: a stand-in with its name, version and requirements takes
its place in the resolution.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
README, DOCKERFILE = ROOT / "README.md", ROOT / "containers/gpu.Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["gpu"]]
# What flash-attn 2.8.3's build uses, beside a compiler.
FLASH_ATTN_BUILD = {"packaging", "psutil", "torch", "wheel", "setuptools"}
FLASH_ATTN = "flash_attn-2.8.3"
FLASH_ATTN_METADATA = """\
Metadata-Version: 2.1
Name: flash-attn
Version: 2.8.3
Requires-Dist: torch
Requires-Dist: einops
"""
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def steps(text: str) -> list[str]:
    """The `pip install` commands of a page or Dockerfile, in order, each on one line."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if not line.lstrip().startswith("#")]
    return [found for line in lines for found in re.findall(r"pip install[^&#]*", line)]


def packages(step: str) -> set[str]:
    """The names of the packages that a command installs."""
    words = [word.strip('"') for word in step.split()[2:] if not word.startswith("-")]
    return {canonicalize_name(re.split(r"[=<>\[]", word)[0]) for word in words}


@pytest.mark.parametrize("text", [README.read_text().partition("## On GPUs")[2], DOCKERFILE.read_text()])
def test_what_builds_flash_attn_is_installed_before_it_is_asked_for(text: str) -> None:
    first, second, *_ = steps(text)
    assert packages(first) >= FLASH_ATTN_BUILD | {"ninja", "numpy", "pybind11"}
    assert "--no-build-isolation" in second
    assert re.search(r"FLASH_ATTN_CUDA_ARCHS=.*pip install --no-build-isolation", text.replace("\\\n", " "))
    # Our own build has the versions that it asks for, too: it is not isolated either.
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert all(requirement in first for requirement in wanted)


def test_the_image_gets_our_requirements_and_no_build_of_ours_without_its_sources(tmp_path: Path) -> None:
    text = DOCKERFILE.read_text()
    before = text.partition("COPY . /src")[0]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script = re.search(r"python3 -c '(.*?)' >", before, re.DOTALL)
    assert script is not None, "nothing lists the requirements before the sources are there"
    command = [sys.executable, "-c", script[1].replace("\\\n", "").replace("/src", str(tmp_path))]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert listed == REQUIREMENTS
    # Without the sources there is no version to build a package of.
    assert not [step for step in steps(before) if "/src" in step]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_pip_resolves_the_gpu_extra(version: str, tmp_path: Path) -> None:
    python = shutil.which(f"python{version}") or ""
    if not python or subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no Python {version} with pip")
    with zipfile.ZipFile(tmp_path / f"{FLASH_ATTN}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{FLASH_ATTN}.dist-info/METADATA", FLASH_ATTN_METADATA)
        wheel.writestr(
            f"{FLASH_ATTN}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{FLASH_ATTN}.dist-info/RECORD", "")
    report = tmp_path / "report.json"
    command = [python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--disable-pip-version-check", "-q"]
    done = subprocess.run(
        [*command, "--find-links", tmp_path, "--report", report, *REQUIREMENTS], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    chosen = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    found = {canonicalize_name(one["name"]): one["version"] for one in chosen}
    assert {name: found[name] for name in ("openrlhf", "vllm", "ray", "deepspeed", "transformers", "torch")} == {
        "openrlhf": "0.11.2", "vllm": "0.29.0", "ray": "2.55.0", "deepspeed": "0.19.6", "transformers": "5.15.0",
        "torch": "2.13.0",
    }  # fmt: skip
    # torch's CUDA build, with the NCCL that it was built for; and what is ours, at the versions that we ask for.
    assert {"nvidia-nccl-cu13", "triton", "flashinfer-python"} <= set(found)
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)])
