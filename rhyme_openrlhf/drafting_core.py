"""The compiled cores (csrc/), or one sentence that says what is missing where they were not built.

`core` makes drafts and `stages` predicts the course of a rollout stage.
"""

from __future__ import annotations

import importlib
from typing import Any, NoReturn


class CoreMissing(ImportError):
    """A feature needs a compiled core, and this installation was built without a C++ compiler."""


class _Missing:
    """Stands in for the module: importing it is fine, using it is not."""

    def __init__(self, features: str, reason: ImportError) -> None:
        self._features, self._reason = features, reason

    def __getattr__(self, name: str) -> NoReturn:
        raise CoreMissing(
            f"{self._features} need the compiled core, which this installation was built without: install a C++20 "
            f"compiler (Debian: apt-get install g++) and run pip install again ({self._reason})"
        ) from self._reason


def _load(name: str, features: str) -> Any:
    """Return the module, or what refuses `features` where there is none."""
    try:
        return importlib.import_module(f"rhyme_openrlhf.{name}")
    except ImportError as error:
        return _Missing(features, error)


core = _load("_drafting", "drafts from history")
stages = _load("_stage", "decisions on TP switches")


def instruction_set() -> str | None:
    """Return what the core was compiled for, or None where it was not."""
    return None if isinstance(core, _Missing) else core.INSTRUCTION_SET
