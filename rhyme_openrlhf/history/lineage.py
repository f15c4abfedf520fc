"""A run's lineage: the archive that it leaves, and the earlier runs that it drafts from (`--history.earlier`).

Invariants:
- Tokens of another tokenizer mean something else: an archive of one is refused where the user names it, and passed
  over where it was found. Another model is fine.
- What a run that starts names must be there. A resumed one goes on without what is gone meanwhile, and says so.
- A reproducible run drafts only from what it names, as far as that was written when the run started. Its checkpoints
  hold the names and sizes (`Lineage.fixed`), and a resumed run reads the same again or says what is missing.
"""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhyme_openrlhf.history.archive import FOLDER, About, Archive, ArchiveError, fingerprint
from rhyme_openrlhf.history.earlier import Sources
from rhyme_openrlhf.history.store import MOST_RUNS, archives_in, beside, in_store, keep_newest
from rhyme_openrlhf.settings.history import AUTO, NONE, HistorySettings

# Runs beside this one that `auto` reads.
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

    `vocabulary`: the number of the tokenizer's tokens. `gone`: sentences on what the user names and is not there, of a
    run that may resume.
    """

    tokenizer: str
    vocabulary: int
    named: tuple[Archive, ...] = ()
    gone: tuple[str, ...] = ()


def ancestors(settings: HistorySettings, tokenizer: Any, may_resume: bool = False) -> Ancestors:
    """Return what a run with this tokenizer can read. Raises ArchiveError with a sentence for the user.

    `may_resume`: what is not there is noted only, because a resumed run goes on without it.
    """
    mark = fingerprint(tokenizer)
    found, gone = _named(settings, mark)
    if gone and not may_resume:
        raise ArchiveError(gone[0])
    return Ancestors(mark, len(tokenizer), tuple(found), tuple(gone))


def _named(settings: HistorySettings, tokenizer: str) -> tuple[list[Archive], list[str]]:
    """Return the archives that the user names, and sentences on those that are not there."""
    if settings.earlier in (AUTO, NONE):
        return [], []
    found: list[Archive] = []
    gone: list[str] = []
    for path in filter(None, (part.strip() for part in settings.earlier.split(","))):
        try:
            there = archives_in(Path(path).absolute())
        except ArchiveError as error:
            gone.append(f"--history.earlier: {error}")
            continue
        same = [archive for archive in there if archive.about.tokenizer == tokenizer]
        if not same:
            raise ArchiveError(
                f"--history.earlier: {path} has responses of another tokenizer, whose tokens mean something else in "
                "this run: leave it out"
            )
        found += same[:MOST_RUNS]
    return found, gone


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
        archives += beside(run_directory, about, AUTO_RUNS)
    archives.sort(key=lambda one: one.about.started)
    sources = Sources(tuple(archives), tuple(stores), about.tokenizer, readable.vocabulary, archive)
    said = []
    if store is not None and (deleted := keep_newest(store)):
        runs = f"{deleted} older run" + ("s" if deleted > 1 else "")
        said.append(f"deleted the responses of {runs} from {store}, which keeps the {MOST_RUNS} newest of a tokenizer")
    if readable.gone and (resumed is None or not reproducible):
        said += [f"{sentence}: the run goes on with the history of its checkpoint" for sentence in readable.gone]
    if not reproducible:
        return Lineage(archive, about, sources), said
    found, missing = _fixed(Lineage(archive, about, sources), resumed)
    return found, [*said, *missing]


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
