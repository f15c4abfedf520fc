"""A service that starts runs, for the tests of launching."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# importlib mode puts no folder of tests on the path: the helper is loaded by its place.
_spec = importlib.util.spec_from_file_location("launch_service", Path(__file__).parent / "launch_service.py")
assert _spec is not None and _spec.loader is not None
_module = importlib.util.module_from_spec(_spec)
sys.modules["launch_service"] = _module
_spec.loader.exec_module(_module)


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Any]:
    """A `launch_service.LaunchService` with the default settings."""
    with _module.launch_service(tmp_path) as service:
        yield service
