"""The script that a test module is named after, as a module."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def script(request: pytest.FixtureRequest) -> ModuleType:
    """`scripts/X.py` for tests/scripts/test_X.py."""
    name = request.path.stem.removeprefix("test_")
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up there.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
