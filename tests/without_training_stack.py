"""Skip what imports the training stack (`pytest --without-training-stack`, as `scripts/test.sh --quick` does).

Each pytest process would import torch, vLLM and OpenRLHF in more than ten seconds, for some hundred tests. A test file
that imports one of them is skipped whole; so is a test that does while it runs.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest

# Transformers and SciPy come with them, and take a second or two each.
STACK = ("torch", "vllm", "openrlhf", "deepspeed", "transformers", "scipy")


class Refusal:
    """A loader that skips instead of loading."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        pytest.skip(f"imports {spec.name}", allow_module_level=True)

    def exec_module(self, module: ModuleType) -> None:
        """Is not reached."""


class Finder:
    """Finds the stack's packages before Python's own finders do, so that they look installed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, Refusal()) if name in STACK else None  # type: ignore[arg-type]


def install() -> None:
    """Begin to skip."""
    sys.meta_path.insert(0, Finder())
