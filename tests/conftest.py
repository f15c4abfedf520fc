"""Shared by all tests: OpenRLHF must be importable on a machine without a GPU; and the project's wheel."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chromium import browser_page, chromium  # noqa: F401 (fixtures, for every folder the same browser)

# The pure parts are tested without torch too.
if importlib.util.find_spec("torch"):
    from rhyme_openrlhf.platform import gpu_present, shims

    if not gpu_present():
        shims.install()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    done = subprocess.run([*command, str(Path(__file__).parents[1])], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built
