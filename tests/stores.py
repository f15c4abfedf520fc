"""SQLite stores with this version's schema, made by copying one that was upgraded.

An upgrade, which tests/api/store/test_database.py tests, takes ten times as long as all else that a service
starts with.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests import compiled_sql

if TYPE_CHECKING:
    from rhyme_openrlhf.api.settings import ServeSettings


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of this process, removed at its end; with the store that all others are copies of."""
    from rhyme_openrlhf.api.store.database import Database

    folder = tempfile.TemporaryDirectory(prefix="rhyme-test-")
    store = Database(f"sqlite:///{folder.name}/upgraded.sqlite")
    store.upgrade()
    store.dispose()
    return folder


def place_upgraded(path: Path) -> None:
    """Put an upgraded store without rows where there is none yet; makes its folder as the service does."""
    compiled_sql.share()
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(Path(_folder().name) / "upgraded.sqlite", path)


def prepare(settings: ServeSettings) -> None:
    """Put an upgraded store where a service with these settings will look for it, if that is a file of its own."""
    from sqlalchemy import make_url

    compiled_sql.share()
    if not settings.database:
        place_upgraded(Path(make_url(settings.database_url()).database or ""))
