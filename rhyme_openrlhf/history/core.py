"""The compiled drafting core (csrc/), or one sentence that says what is missing where it was not built."""

from __future__ import annotations

from typing import Any, NoReturn


class CoreMissing(ImportError):
    """Drafts from history were asked for, and this installation was built without a C++ compiler."""


class _Missing:
    """Stands in for the module: importing it is fine, using it is not."""

    def __init__(self, reason: ImportError) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        raise CoreMissing(
            "drafts from history need the compiled core, which this installation was built without: install a C++20 "
            f"compiler (Debian: apt-get install g++) and run pip install again ({self._reason})"
        ) from self._reason


core: Any
try:
    from rhyme_openrlhf import _drafting

    core = _drafting
except ImportError as error:
    core = _Missing(error)


def instruction_set() -> str | None:
    """Return what the core was compiled for, or None where it was not."""
    return None if isinstance(core, _Missing) else core.INSTRUCTION_SET
