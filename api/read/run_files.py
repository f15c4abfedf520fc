"""The files of a run, by kind, and one archive of many of them.

Kinds: `record` (the run directory's own files), `logs`, `samples`, `history` and `checkpoints` (below `--ckpt.path`, to
which the run directory has a link). The archive is a gzip-compressed tar file, made while it is sent.

Invariants:
- Files are regular files below the resolved run directory, or below the resolved checkpoint directory if that is below
  one of the service's roots. Symbolic links in them are neither followed nor listed.
- An archive holds a block of one file in memory at a time. In it a file has the size that it had when its turn came.
  What is written later is left out, and what was cut off since is filled with zeros.
"""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field
from sqlalchemy.orm import Session

from rhyme_openrlhf.api.read.log_files import LogError, files_below, folder_of, open_log
from rhyme_openrlhf.api.store.bounds import View
from rhyme_openrlhf.api.store.lookup import find_attempt, find_run
from rhyme_openrlhf.telemetry.run_directory import SAMPLES_FOLDER

Kind = Literal["record", "logs", "samples", "history", "checkpoints"]
KINDS: tuple[Kind, ...] = ("record", "logs", "samples", "history", "checkpoints")
# Checkpoints are large, and lie where the user has put them; indexes of history are made anew by a run that resumes.
USUAL: tuple[Kind, ...] = ("record", "logs", "samples")
CHECKPOINTS = "checkpoints"
# Most files listed: a run of thousands of steps, with its logs and checkpoints.
MAX_FILES = 20_000
BLOCK = 1024 * 1024
# zlib's code for gzip's header, with the largest window.
GZIP = 31


class RunFileView(View):
    """A file of a run."""

    name: str = Field(description="Path in the run directory.", examples=["logs/driver.log"])
    kind: Kind
    size: int = Field(description="Bytes.")
    modified_at: float


@dataclass(frozen=True)
class Place:
    """A folder of files. `name`: its path in the run directory, "" for that itself; `path`: where it is, resolved."""

    name: str
    path: Path


def places_of_attempt(session: Session, uid: str, number: int, roots: Sequence[Path]) -> list[Place]:
    """Return the folders of an attempt of the run `uid`. Raises NotFoundError, LogError."""
    directory = find_attempt(session, find_run(session, uid), number).run_directory or ""
    run = folder_of(directory, roots, ".")
    found = [Place("", run)]
    try:
        checkpoints = (run / CHECKPOINTS).resolve()
    except (OSError, RuntimeError):
        return found
    if checkpoints.is_dir() and any(checkpoints.is_relative_to(root) for root in roots):
        found.append(Place(CHECKPOINTS, checkpoints))
    return found


def list_files(places: Sequence[Place]) -> list[RunFileView]:
    """Return the files of these places by name, at most MAX_FILES."""
    found: list[RunFileView] = []
    for place in places:
        for below, about in files_below(place.path):
            shown = f"{place.name}/{below}" if place.name else below
            file = RunFileView(name=shown, kind=kind_of(shown), size=about.st_size, modified_at=about.st_mtime)
            found.append(file)
            if len(found) >= MAX_FILES:
                return found
    return found


def sizes(files: Iterable[RunFileView]) -> dict[Kind, tuple[int, int]]:
    """Return the number of files and their bytes by kind, without kinds that have none."""
    found: dict[Kind, tuple[int, int]] = {}
    for file in files:
        count, size = found.get(file.kind, (0, 0))
        found[file.kind] = count + 1, size + file.size
    return {kind: found[kind] for kind in KINDS if kind in found}


def kind_of(name: str) -> Kind:
    """Return the kind of a file by its path in the run directory."""
    first, _, rest = name.partition("/")
    kinds: dict[str, Kind] = {
        "logs": "logs", SAMPLES_FOLDER: "samples", "history": "history", CHECKPOINTS: "checkpoints",
    }  # fmt: skip
    return kinds.get(first, "record") if rest else "record"


def archive(places: Sequence[Place], kinds: Collection[Kind], folder: str) -> Iterator[bytes]:
    """Yield an archive of all files of these kinds, below `folder`; files that are gone by then are left out."""
    packer = zlib.compressobj(wbits=GZIP)
    by_name = {place.name: place.path for place in places}
    for file in list_files(places):
        if file.kind not in kinds:
            continue
        is_checkpoint = file.kind == CHECKPOINTS
        path, name = (by_name[CHECKPOINTS], file.name.partition("/")[2]) if is_checkpoint else (by_name[""], file.name)
        try:
            for block in _entry(path, name, f"{folder}/{file.name}"):
                yield packer.compress(block)
        except LogError:
            continue
    yield packer.compress(bytes(2 * tarfile.BLOCKSIZE)) + packer.flush()


def _entry(place: Path, name: str, shown: str) -> Iterator[bytes]:
    """Yield one file as an entry of a tar file. Raises LogError before the first block if it cannot be opened."""
    with open_log(place, name) as file:
        about = os.fstat(file.fileno())
        header = tarfile.TarInfo(shown)
        header.size, header.mtime, header.mode = about.st_size, int(about.st_mtime), 0o644
        yield header.tobuf(tarfile.PAX_FORMAT)
        left = about.st_size
        while left > 0:
            block = file.read(min(left, BLOCK)) or bytes(min(left, BLOCK))
            left -= len(block)
            yield block
        yield bytes(-about.st_size % tarfile.BLOCKSIZE)
