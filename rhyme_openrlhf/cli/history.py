"""`rhyme history`: the responses that runs have left for later runs (history/archive.py).

List them, say how alike they are from epoch to epoch, delete the oldest.

Invariants: only archives of runs that have ended are deleted, never another file of a run. A run that reads a deleted
archive goes on without it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rhyme_openrlhf.cli.console import console, refuse
from rhyme_openrlhf.history.archive import RESPONSES, Archive, ArchiveError, ArchiveReader, Stored, delete, goes_on
from rhyme_openrlhf.history.record import read_pieces
from rhyme_openrlhf.history.similarity import Similarity, responses
from rhyme_openrlhf.history.store import below
from rhyme_openrlhf.prompt_keys import is_evaluation
from rhyme_openrlhf.settings.options import Parser
from rhyme_openrlhf.telemetry import wording

GB, MB = 10**9, 10**6
SECONDS_PER_DAY = 86400.0
# Response tokens that `similarity` reads of an archive: about half a minute, at a million tokens a second.
MOST_TOKENS = 20_000_000


@dataclass(frozen=True)
class Content:
    """An archive with its bytes, prompts and most rollouts of one prompt."""

    archive: Archive
    size: int
    prompts: int
    rollouts: int


def main(argv: Sequence[str]) -> int:
    """Run the command; 2 where a directory has no archive, or something cannot be deleted."""
    parser = Parser(prog="rhyme history", description="Responses that runs have left for later runs.")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="show the archives in stores, run directories, or directories of runs")
    comparing = commands.add_parser(
        "similarity", help="show how much of each epoch's responses the epoch before has: what drafts can gain"
    )
    pruning = commands.add_parser("prune", help="delete the oldest archives until the others fit")
    for command in (listing, comparing, pruning):
        command.add_argument("directories", nargs="*", type=Path, default=[Path("runs")], metavar="DIR")
    pruning.add_argument("--keep-gb", type=_size, required=True, help="GB that may stay", metavar="GB")
    chosen = parser.parse_args(list(argv))
    try:
        archives = list({one.directory: one for path in chosen.directories for one in below(path.absolute())}.values())
    except ArchiveError as error:
        return refuse("rhyme history", error)
    archives.sort(key=lambda one: -one.about.started)
    if chosen.command == "list":
        _show([content(one) for one in archives])
        return 0
    if chosen.command == "similarity":
        return _show_similarity(archives)
    # A checkpoint's history can be read like an archive, and is a part of the checkpoint.
    return _prune([one for one in archives if one.pattern == RESPONSES], chosen.keep_gb * GB)


def _size(text: str) -> float:
    size = float(text)
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of GB from 0 on")
    return size


def content(archive: Archive) -> Content:
    """Return what is in an archive."""
    by_prompt: dict[str, set[int]] = {}
    for key, stored in ArchiveReader(archive).new():
        by_prompt.setdefault(key, set()).add(stored.rollout_id)
    return Content(archive, sum(archive.sizes.values()), len(by_prompt), max(map(len, by_prompt.values()), default=0))


def _show(found: Sequence[Content]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for name in ("run", "prompts", "epochs", "MB", "days ago", "model", "directory"):
        table.add_column(name)
    now = time.time()
    for one in found:
        about = one.archive.about
        cells = (
            about.run,
            f"{one.prompts:,}",
            str(one.rollouts),
            f"{one.size / MB:,.1f}",
            f"{max(now - about.started, 0) / SECONDS_PER_DAY:.1f}",
            about.model,
            str(one.archive.directory),
        )
        table.add_row(*(Text(wording.without_controls(cell)) for cell in cells))
    console().print(table)


def similarity(archive: Archive) -> dict[int, Similarity]:
    """Return each epoch (a prompt's n-th rollout) held against the one before: of all training prompts, or of some.

    They are taken in the order of their keys, which are hashes, until MOST_TOKENS were read.
    """
    reader = ArchiveReader(archive)
    by_prompt: dict[str, list[Stored]] = {}
    for key, stored in reader.new():
        if not is_evaluation(key):
            by_prompt.setdefault(key, []).append(stored)
    epochs: dict[int, Similarity] = {}
    read = 0
    for key in sorted(by_prompt):
        if read >= MOST_TOKENS:
            break
        before: list[list[int]] = []
        for epoch, stored in enumerate(sorted(by_prompt[key]), 1):
            encoded = reader.read(stored)
            now = responses(read_pieces(encoded)) if encoded is not None else []
            if before and now:
                epochs.setdefault(epoch, Similarity()).add(now, before)
            before = now
            read += stored.tokens
    return dict(sorted(epochs.items()))


def _show_similarity(archives: Sequence[Archive]) -> int:
    seen = 0
    for archive in archives:
        for epoch, found in similarity(archive).items():
            seen += 1
            name = wording.without_controls(archive.about.run)
            print(
                f"{name}, epoch {epoch}: {found.share:.0%} of {found.tokens:,} response tokens "
                f"({len(found.shares):,} responses) continue as in epoch {epoch - 1}"
            )
    if not seen:
        return refuse("rhyme history", "no prompt of these runs was answered in two epochs: nothing can be compared")
    print("Loads that were measured: 84 to 91 % gave rollouts of 2.1 times the speed, 18 to 19 % up to 1.4 times.")
    return 0


def _prune(archives: Sequence[Archive], room: float) -> int:
    """Delete what does not fit; `archives`: the newest first."""
    kept = deleted = 0
    code = 0
    for archive in archives:
        size = sum(archive.sizes.values())
        if kept + size <= room and not deleted:
            kept += size
            continue
        if goes_on(archive):
            kept += size
            print(f"kept {wording.without_controls(archive.about.run)}, which is going on: {archive.directory}")
            continue
        try:
            delete(archive)
        except OSError as error:
            code = refuse("rhyme history", f"{archive.directory} cannot be deleted: {error.strerror}")
            continue
        deleted += size
        print(f"deleted {wording.without_controls(archive.about.run)}, {size / MB:,.1f} MB: {archive.directory}")
    print(f"{deleted / MB:,.1f} MB deleted, {kept / MB:,.1f} MB kept")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
