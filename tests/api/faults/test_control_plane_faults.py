"""Short versions of what `scripts/control_plane_faults.py` does for long: real processes, and every event counted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rhyme_openrlhf

pytest.importorskip("uvicorn")

ROOT = Path(rhyme_openrlhf.__file__).parents[1]
SCRIPT = ROOT / "scripts" / "control_plane_faults.py"
TEMPORARY_POSTGRESQL = ROOT / "scripts" / "temporary_postgresql.py"
# Half a minute on a quiet machine; each of up to five processes needs a minute to start on a busy one.
LIMIT_SECONDS = 900


def skip_without(name: str, store: str) -> None:
    if store == "postgresql":
        # A command that needs no server says whether one could be had.
        shown = subprocess.run([sys.executable, str(TEMPORARY_POSTGRESQL), "--", "true"], check=False)
        if shown.returncode == 3:
            pytest.skip("PostgreSQL is not installed")
    if name == "disk_full" and (os.geteuid() != 0 or shutil.which("mount") is None):
        pytest.skip("only root can mount a small disk")


@pytest.mark.timeout(LIMIT_SECONDS + 60)
# Not every pair: what differs between the stores is how they die and how they run out of space.
@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("server_killed", "sqlite"),
        ("workers_killed", "sqlite"),
        ("postgresql_killed", "postgresql"),
        ("disk_full", "sqlite"),
        ("disk_full", "postgresql"),
        ("file_limit", "sqlite"),
        ("clock_jumps", "sqlite"),
        ("holder_killed", "sqlite"),
        ("holder_frozen", "postgresql"),
    ],
)
def test_nothing_is_lost_or_doubled(name: str, store: str, tmp_path: Path, starts_service: None) -> None:
    skip_without(name, store)
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--only", name, "--stores", store, "--seconds", "2", "--runs", "2",
         "--out", str(out)],
        capture_output=True, text=True, timeout=LIMIT_SECONDS, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(out.read_text())
    assert row["times"] >= 1 and row["events"] > 500
    assert (row["lost"], row["doubled"], row["different"], row["problems"]) == (0, 0, 0, [])
    if name.startswith("holder"):
        assert row["started"]["once"] >= 6 and row["started"]["twice"] == 0
        assert 0 < max(row["takeover_seconds"]) <= 30
