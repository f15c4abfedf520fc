"""Sign-in links made on the service's own machine, for users who can read and write its database.

The service writes its addresses to a file in its data directory, because its port may change at each start. The first
line is for programs on this machine, the last one for people: a proxy's, if there is one.
"""

from __future__ import annotations

import time
from pathlib import Path

from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from rhyme_openrlhf.api.settings import ServeSettings
from rhyme_openrlhf.api.store import credentials
from rhyme_openrlhf.api.store.database import Database, DatabaseError
from rhyme_openrlhf.api.store.readiness import schema_is_current

ADDRESS_FILE = "address"


def keep_address(data: Path, here: str, for_people: str) -> None:
    """Write the addresses of the service to its data directory. Raises OSError."""
    (data / ADDRESS_FILE).write_text(f"{here}\n{for_people}\n")


def kept_address(settings: ServeSettings) -> str:
    """Return the last address of the service on this machine, or that of its settings if it never started."""
    return _kept(settings)[0]


def kept_address_for_people(settings: ServeSettings) -> str:
    """Return the last address at which people reach the service, or that of its settings if it never started."""
    return _kept(settings)[-1]


def _kept(settings: ServeSettings) -> list[str]:
    try:
        return (settings.data_path() / ADDRESS_FILE).read_text().split() or [settings.base_url()]
    except OSError:
        return [settings.base_url()]


def store_file(settings: ServeSettings) -> Path | None:
    """Return the service's SQLite file, or None for a PostgreSQL database. Raises DatabaseError for an invalid URL."""
    database = Database(settings.database_url())
    return Path(database.engine.url.database or "") if database.is_sqlite else None


def new_code(settings: ServeSettings) -> str:
    """Return a new sign-in code for the service with these settings, which may be running. Raises DatabaseError."""
    file = store_file(settings)
    if file is not None and not file.is_file():
        # Connecting would create an empty database.
        raise DatabaseError(f"there is no database {file}: start `rhyme serve`, which creates it and prints a link")
    database = Database(settings.database_url())
    shown = make_url(settings.database_url()).render_as_string(hide_password=True)
    try:
        if not schema_is_current(database):
            raise DatabaseError(
                f"the database {shown} has another version's schema: start this version's service first"
            )
        with database.writing() as session:
            return credentials.issue_code(session, time.time(), credentials.CODE_SECONDS)
    except SQLAlchemyError as error:
        raise DatabaseError(f"the database {shown} cannot be used: {type(error).__name__}") from error
    finally:
        database.dispose()
