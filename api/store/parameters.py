"""A run's settings as rows, so that runs are found and sorted by any setting without reading configurations.

Their names are those of `settings/recorded.py`.

Invariant: `keep_parameters` is called in each transaction that changes a run's configuration or creates a run.
"""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.store.models import NAME_LENGTH, Run, RunParameter
from rhyme_openrlhf.settings.recorded import recorded_settings
from rhyme_openrlhf.settings.redaction import redact_config

# Longer texts are kept up to here; nobody compares more of them.
TEXT_LENGTH = 500


def settings_of(run: Run) -> dict[str, Any]:
    """Return every recorded setting by its key, without machine and versions."""
    return recorded_settings(run.config, run.spec)


def keep_parameters(session: Session, run: Run) -> None:
    """Replace the run's rows by those of its present configuration."""
    session.flush()
    session.execute(delete(RunParameter).where(RunParameter.run_id == run.id))
    # Secrets are hidden, as the store hides them in the configuration itself.
    hidden = Run(config=redact_config(run.config or {}), spec=run.spec and redact_config(run.spec))
    rows = [
        {"run_id": run.id, "name": name[:NAME_LENGTH], **_columns(value)}
        for name, value in settings_of(hidden).items()
        if value is not None and name
    ]
    unique = {row["name"]: row for row in rows}
    if unique:
        session.execute(insert(RunParameter), list(unique.values()))


def keep_all_parameters(session: Session) -> None:
    """Call `keep_parameters` for runs that an earlier version stored."""
    without = ~select(RunParameter.name).where(RunParameter.run_id == Run.id).exists()
    for run in session.scalars(select(Run).where(without)):
        keep_parameters(session, run)


def _columns(value: Any) -> dict[str, Any]:
    """Return the number and the text of a value; switches are "true" and "false"."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    text = value if isinstance(value, str) else json.dumps(value)
    return {"number": float(value) if is_number else None, "text": text[:TEXT_LENGTH]}
