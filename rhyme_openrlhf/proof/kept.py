"""Proofs that this machine keeps: a file for each kind of engine that has proved its drafts. Pure.

A proof holds for one GPU, driver, versions, architecture, number format, ranks, model runner, graphs and attention.
The engine that proved itself writes it on its own node, so a cluster needs no more than one machine. What failed is not
kept: the next run tries again.

Invariants: each file is written in one piece, and nobody else's file is touched. An unreadable file is none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rhyme_openrlhf.telemetry.run_directory import write_json
from rhyme_openrlhf.user_cache import user_cache

# Bytes of a digest that tell the kinds of engines of one machine apart.
DIGEST_BYTES = 8


@dataclass(frozen=True)
class Subject:
    """The engine that a proof is of. `runner` is vLLM's model runner with its scheduling, `graphs` their mode."""

    gpu: str
    driver: str
    versions: Mapping[str, str]
    architecture: str
    dtype: str
    ranks: int
    runner: str
    graphs: str
    attention: str

    def text(self) -> str:
        """Return all of it in one form."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


def folder() -> Path:
    """Return where they are; the folder need not exist."""
    return user_cache() / "proofs"


def path(subject: Subject) -> Path:
    """Return the file of a subject's proof."""
    digest = hashlib.blake2b(subject.text().encode(), digest_size=DIGEST_BYTES).hexdigest()
    return folder() / f"{digest}.json"


def date(subject: Subject) -> str:
    """Return when the subject proved its drafts (ISO); "" if it did not."""
    row = _row(path(subject))
    same = row.get("subject") == json.loads(subject.text())
    return str(row.get("date", "")) if same else ""


def nearest(subject: Subject) -> str:
    """Return what is other in the most alike of the proofs kept ("driver 580.1, now 590.2"); "" without any."""
    mine = json.loads(subject.text())
    differences = []
    for file in sorted(folder().glob("*.json")):
        theirs = _row(file).get("subject")
        if isinstance(theirs, dict) and theirs.keys() == mine.keys():
            names = [name for name in mine if theirs[name] != mine[name]]
            words = [
                f"other {name}" if isinstance(mine[name], dict) else f"{name} {theirs[name]}, now {mine[name]}"
                for name in names
            ]
            differences.append((len(names), ", ".join(words)))
    return min(differences, default=(0, ""))[1]


def write(subject: Subject, when: str) -> Path:
    """Keep a proof; returns its file. Raises OSError."""
    file = path(subject)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, {"subject": dataclasses.asdict(subject), "date": when})
    return file


def remove(subject: Subject) -> None:
    """Drop a proof that was disproved. Raises OSError."""
    path(subject).unlink(missing_ok=True)


def _row(file: Path) -> dict[str, object]:
    try:
        row = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
