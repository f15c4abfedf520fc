"""A run's lineage: the archive that it leaves, and the earlier runs that it drafts from (`--history.earlier`).

Invariants:
- Tokens of another tokenizer mean something else: an archive of one is refused where the user names it, and passed
  over where it was found. Another model is fine.
- A reproducible run drafts only from what it names, as far as that was written when the run started. Its checkpoints
  hold the names and sizes (`Lineage.fixed`), and a resumed run reads the same again or says what is missing.
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhyme_openrlhf.history.archive import (
    FOLDER,
    About,
    Archive,
    ArchiveError,
    archives_in,
    beside,
    fingerprint,
    in_store,
)
from rhyme_openrlhf.history.earlier import MOST_RUNS, Sources
from rhyme_openrlhf.settings.history import AUTO, NONE, HistorySettings

# Runs beside this one that `auto` looks at, the newest first.
AUTO_RUNS = 4
# Random bytes behind the run's name in a store, because two runs may have one name.
NAME_BYTES = 4
# Names and sizes of files, by the archive's directory.
Fixed = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Lineage:
    """The archive of a run, what it says of the run, and where the run drafts from."""

    archive: Path
    about: About
    sources: Sources
    fixed: Fixed = field(default_factory=dict)
    """Names and sizes of all that a reproducible run drafts from; empty in another run."""


@dataclass(frozen=True)
class Ancestors:
    """The archives that a run can read: of this tokenizer (a fingerprint); and those that the user names.

    `vocabulary`: the number of the tokenizer's tokens.
    """

    tokenizer: str
    vocabulary: int
    named: tuple[Archive, ...] = ()


def ancestors(settings: HistorySettings, tokenizer: Any) -> Ancestors:
    """Return what a run with this tokenizer can read. Raises ArchiveError with a sentence for the user."""
    mark = fingerprint(tokenizer)
    return Ancestors(mark, len(tokenizer), tuple(_named(settings, mark)))


def _named(settings: HistorySettings, tokenizer: str) -> list[Archive]:
    if settings.earlier in (AUTO, NONE):
        return []
    found: list[Archive] = []
    for path in filter(None, (part.strip() for part in settings.earlier.split(","))):
        try:
            there = archives_in(Path(path).absolute())
        except ArchiveError as error:
            raise ArchiveError(f"--history.earlier: {error}") from error
        same = [archive for archive in there if archive.about.tokenizer == tokenizer]
        if not same:
            raise ArchiveError(
                f"--history.earlier: {path} has responses of another tokenizer, whose tokens mean something else in "
                "this run: leave it out"
            )
        found += same[:MOST_RUNS]
    return found


def lineage(
    settings: HistorySettings,
    reproducible: bool,
    run_directory: Path,
    about: About,
    readable: Ancestors,
    resumed: Fixed | None = None,
) -> tuple[Lineage, list[str]]:
    """Return the lineage of a run that starts now, and sentences for the user.

    `readable`: by `ancestors`; `resumed`: what the reproducible run that this one goes on from drafted from.
    """
    archive = run_directory / FOLDER
    store = Path(settings.store).absolute() if settings.store else None
    if store is not None:
        archive = store / f"{Path(about.run).name or 'run'}-{secrets.token_hex(NAME_BYTES)}"
    archives, stores = list(readable.named), [store] if store is not None and settings.earlier != NONE else []
    if settings.earlier == AUTO and not reproducible:
        archives += beside(run_directory, about.tokenizer, AUTO_RUNS)
    # Of runs that are not judged yet the newest drafts first; later ones in this order count as newer.
    archives.sort(key=lambda one: one.about.started)
    sources = Sources(tuple(archives), tuple(stores), about.tokenizer, readable.vocabulary, archive)
    if not reproducible:
        return Lineage(archive, about, sources), []
    return _fixed(Lineage(archive, about, sources), resumed)


def _fixed(found: Lineage, resumed: Fixed | None) -> tuple[Lineage, list[str]]:
    """Return the lineage of a reproducible run: nothing that is written from now on is read."""
    said: list[str] = []
    sources = found.sources
    if resumed is not None:
        archives, limits = [], resumed
        for directory, files in resumed.items():
            try:
                (archive,) = archives_in(Path(directory))
            except (ArchiveError, ValueError):
                archive = None
            sizes = archive.sizes if archive is not None else {}
            if archive is None or archive.about.tokenizer != sources.tokenizer:
                said.append(f"the run drafted from {directory}, which is missing: samples may differ from now on")
                continue
            short = [name for name, size in files.items() if sizes.get(name, 0) < size]
            if short:
                said.append(f"the run drafted from {directory}, which lacks {', '.join(short)}: samples may differ")
            archives.append(archive)
    else:
        archives = list(sources.archives)
        for store in sources.stores:
            archives += [one for one in in_store(store) if one.about.tokenizer == sources.tokenizer][:MOST_RUNS]
        limits = {str(one.directory): one.sizes for one in archives}
    fixed = dataclasses.replace(sources, archives=tuple(archives), stores=(), limits=limits)
    return dataclasses.replace(found, sources=fixed, fixed=dict(limits)), said
