"""The folder of this project in the user's cache: what can be made again, but takes minutes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_cache(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder, which need not exist (XDG Base Directory Specification)."""
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME") or Path.home()) / ".cache"
    return Path(cache) / "rhyme-openrlhf"
