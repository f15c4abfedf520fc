"""The places where runs find each other's archives (history/archive.py): side by side, or in a store that they share.

A store keeps the MOST_RUNS newest archives of each tokenizer, because a run reads no more. A run that starts deletes
the others (`keep_newest`). A run directory's archive is deleted with its directory, or by `rhyme history prune`.

Invariants:
- Nothing here deletes what a run still writes to, or the history in a checkpoint.
- An archive of another user, or a damaged one, is passed over.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rhyme_openrlhf.history.archive import (
    ABOUT_FILE,
    CHECKPOINT_STATE,
    FOLDER,
    About,
    Archive,
    ArchiveError,
    delete,
    goes_on,
    read_archive,
    read_checkpoint,
)

# Archives of one tokenizer that a store keeps, and that a run reads of it: the newest.
MOST_RUNS = 20
# A run's directory in a control plane has one of each attempt (api/launch/actions.py).
ATTEMPT = re.compile(r"attempt-\d+")
# Directories beside a run that are looked into, the newest first.
MOST_LOOKED_AT = 200


def archives_in(path: Path) -> list[Archive]:
    """Return the archives that a path names, the newest first.

    It is a run directory, a control plane's directory of a run, an archive, a checkpoint or a store. Raises
    ArchiveError where there is none.
    """
    for directory in (path, path / FOLDER):
        if os.path.exists(directory / ABOUT_FILE):
            return [read_archive(directory)]
    if os.path.exists(path / CHECKPOINT_STATE):
        return [read_checkpoint(path)]
    attempts = [one / FOLDER for _, one in _directories(path) if ATTEMPT.fullmatch(one.name)]
    found = in_store(path) or _newest_first(_readable(attempts))
    if not found:
        raise ArchiveError(f"{path} is no run directory, checkpoint or store with responses")
    return found


def in_store(path: Path, known: Mapping[Path, Archive] | None = None) -> list[Archive]:
    """Return the archives below a store, the newest first; those that cannot be read are left out.

    `known`: archives that were read before, by their directory.
    """
    there = [directory for _, directory in _directories(path)]
    before = [known[directory] for directory in there if directory in known] if known else []
    return _newest_first([*before, *_readable([one for one in there if not known or one not in known])])


def _readable(directories: Sequence[Path]) -> list[Archive]:
    found = []
    for directory in directories:
        with contextlib.suppress(ArchiveError):
            found.append(read_archive(directory))
    return found


def _newest_first(archives: Sequence[Archive]) -> list[Archive]:
    return sorted(archives, key=lambda one: (-one.about.started, str(one.directory)))


def keep_newest(store: Path) -> int:
    """Delete archives of runs that have ended, but for the MOST_RUNS newest of each tokenizer; return their number."""
    kept: dict[str, int] = {}
    deleted = 0
    for archive in in_store(store):
        kept[archive.about.tokenizer] = kept.get(archive.about.tokenizer, 0) + 1
        if kept[archive.about.tokenizer] > MOST_RUNS and not goes_on(archive):
            # Another run may delete it at this moment.
            with contextlib.suppress(OSError):
                delete(archive)
                deleted += 1
    return deleted


def below(path: Path) -> list[Archive]:
    """Return the archives of a run, a store or a directory of runs, the newest first. Raises ArchiveError for none."""
    try:
        return archives_in(path)
    except ArchiveError:
        found = _readable([about.parent for about in sorted(path.glob(f"*/{FOLDER}/{ABOUT_FILE}"))])
        if not found:
            raise
        return _newest_first(found)


def _directories(path: Path) -> list[tuple[float, Path]]:
    """Return the directories in a directory, each with the time of its last change; none where they cannot be seen."""
    found: list[tuple[float, Path]] = []
    try:
        entries = list(os.scandir(path))
    except OSError:
        return []
    for one in entries:
        # A link may lead nowhere, and a directory may go meanwhile.
        with contextlib.suppress(OSError):
            if one.is_dir():
                found.append((one.stat().st_mtime, Path(one.path)))
    return found


def beside(run_directory: Path, about: About, most: int) -> list[Archive]:
    """Return archives of other runs in the same directory as this run, whose tokenizer is that of `about`.

    At most `most`: those of the same data come first, and of those the newest.
    """
    places = [run_directory.parent]
    if ATTEMPT.fullmatch(run_directory.name):
        places = [one for one in run_directory.parent.parent.glob("*") if one.is_dir()]
    candidates = [one for place in places for one in _directories(place) if one[1] != run_directory]
    newest = [path / FOLDER for _, path in sorted(candidates, reverse=True)[:MOST_LOOKED_AT]]
    found = [one for one in _readable(newest) if one.about.tokenizer == about.tokenizer]
    return sorted(found, key=lambda one: one.about.data != about.data)[:most]
