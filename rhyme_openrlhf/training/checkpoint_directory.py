"""The files below --ckpt.path, and which checkpoint a run can resume from. Pure: files and directories only.

- `_actor/<tag>/`: OpenRLHF's (DeepSpeed's) checkpoint of the policy; _actor/latest names the one that is loaded, with
  --ds.use_universal_ckpt _actor/latest_universal
- `_critic/<tag>/`: the same of the critic, if there is one
- `_rhyme/<tag>/`: what OpenRLHF does not save (training/checkpoint.py), and `complete.json`
- `_rhyme/aside/`: the best checkpoint of before, while a new best one is written

Tags are OpenRLHF's: global_step<n> and best_global_step<n>.

Invariants:
- `_rhyme/<tag>` is there before anything of that tag is written, and goes last. So a tag without it is plain
  OpenRLHF's, and one with it but without a true `complete.json` is half-written or half-deleted.
- `complete.json` lists every file of the tag with its size, and is written when all of them are. A tag is complete only
  while all of them are there: a kill while an old checkpoint is deleted does not leave one that looks whole.
- "Newest" is the one completed last, by a number that counts up; a clock is not asked.
- Every change that a kill may interrupt is a rename, or is repeated at the next start (`tidy`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS = "_rhyme"
POLICY = "_actor"
CRITIC = "_critic"
ASIDE = "aside"
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
COMPLETE = "complete.json"
BEST = "best_"
TAG = re.compile(rf"(?:{BEST})?global_step(?P<step>\d+)")


@dataclass(frozen=True)
class Tag:
    """A checkpoint to resume from. `complete` is False for plain OpenRLHF's: nothing says that it is whole."""

    name: str
    step: int
    complete: bool


def tag_of(step: int) -> str:
    """OpenRLHF's name of the checkpoint after training step `step`."""
    return f"global_step{step}"


class CheckpointDirectory:
    """The directory of --ckpt.path; `critic` says whether the run trains one."""

    def __init__(self, path: Path, critic: bool) -> None:
        self.path = path
        self._models = (POLICY, CRITIC) if critic else (POLICY,)

    def ours(self, tag: str) -> Path:
        """Return where our own part of a checkpoint is."""
        return self.path / OURS / tag

    # --- saving

    def begin(self, tag: str) -> Path:
        """Note that `tag` is half-written from now on; return the empty directory for our part.

        OpenRLHF deletes the best checkpoint of before when it begins to write a new one; so that is put aside first.
        """
        self._remove(tag)
        self.ours(tag).mkdir(parents=True)
        _sync(self.ours(tag).parent)
        if tag.startswith(BEST):
            for model in self._models:
                for old in self._directories(self.path / model):
                    if old.name.startswith(BEST):
                        kept = self.path / OURS / ASIDE / model / old.name
                        shutil.rmtree(kept, ignore_errors=True)
                        kept.parent.mkdir(parents=True, exist_ok=True)
                        old.rename(kept)
        return self.ours(tag)

    def commit(self, tag: str) -> bool:
        """Note that all of `tag` is written, so it is the newest; False if its model is not seen from here."""
        if not all((self.path / model / tag).is_dir() for model in self._models):
            return False
        number = 1 + max((self._number(name) for name in self._tags()), default=0)
        write_json(self.ours(tag) / COMPLETE, {"number": number, "files": self._sizes(tag)})
        self.tidy()
        return True

    def tidy(self) -> None:
        """Finish what a kill, or OpenRLHF's own deleting of old checkpoints, left undone."""
        aside = self.path / OURS / ASIDE
        new_best = any(name.startswith(BEST) and self.is_complete(name) for name in self._tags())
        for model in (POLICY, CRITIC):
            for old in self._directories(aside / model):
                if new_best or (self.path / model / old.name).exists():
                    shutil.rmtree(old)
                else:
                    old.rename(self.path / model / old.name)
        for name in self._tags():
            gone = not any((self.path / model / name).exists() for model in (POLICY, CRITIC))
            if gone and self._number(name):
                shutil.rmtree(self.ours(name))

    # --- resuming

    def newest(self) -> Tag | None:
        """Return the checkpoint to resume from, None if there is none."""
        latest = self.latest(POLICY)
        if latest is not None and not self.ours(latest).exists():
            # Written by OpenRLHF itself, after everything of ours: each save sets `latest`.
            return Tag(latest, _step(latest), complete=False)
        complete = [name for name in self._tags() if self.is_complete(name)]
        if not complete:
            return None
        name = max(complete, key=self._number)
        return Tag(name, _step(name), complete=True)

    def newest_universal(self) -> Tag | None:
        """Return the universal checkpoint to resume from, None if there is none."""
        name = self.universal(POLICY)
        return None if name is None else Tag(name, _step(name), complete=False)

    def use(self, tag: Tag) -> list[str]:
        """Make `tag` the one that OpenRLHF loads, and delete half-written ones; returns their names."""
        for model in self._models:
            write_atomically(self.path / model / LATEST, tag.name.encode())
        return self.remove_incomplete()

    def remove_incomplete(self) -> list[str]:
        """Delete half-written checkpoints: OpenRLHF would count them among those it keeps. Returns their names."""
        removed = [name for name in self._tags() if not self.is_complete(name)]
        for name in removed:
            self._remove(name)
        return removed

    def is_complete(self, tag: str) -> bool:
        """Return whether all that was written of `tag` is there, also of models that this run does not have."""
        files = self._complete(tag).get("files", {})
        return bool(files) and all(_size(self.path / name) == size for name, size in files.items())

    def latest(self, model: str) -> str | None:
        """Return the tag of a model that OpenRLHF would load now, None if there is none."""
        name = self.named(model, LATEST)
        return name if name and TAG.fullmatch(name) and (self.path / model / name).is_dir() else None

    def named(self, model: str, file: str) -> str | None:
        """Return what a model's `latest` or `latest_universal` names, None without such a file."""
        path = self.path / model / file
        return path.read_text(errors="replace").strip() if path.is_file() else None

    def universal(self, model: str) -> str | None:
        """Return the name of the universal checkpoint that DeepSpeed would load, None if there is none."""
        name = self.named(model, LATEST_UNIVERSAL)
        return name if name and (self.path / model / name).is_dir() else None

    def strangers(self) -> list[str]:
        """Return the policy's checkpoints that nothing here knows: neither a save of ours nor what `latest` names."""
        known = {*self._tags(), self.latest(POLICY)}
        return [child.name for child in self._directories(self.path / POLICY) if child.name not in known]

    def _remove(self, tag: str) -> None:
        # Our own part last: while it is there, what is left of the tag counts as half-written.
        (self.ours(tag) / COMPLETE).unlink(missing_ok=True)
        for model in (POLICY, CRITIC):
            shutil.rmtree(self.path / model / tag, ignore_errors=True)
        shutil.rmtree(self.ours(tag), ignore_errors=True)

    def _sizes(self, tag: str) -> dict[str, int]:
        parts = [self.path / OURS / tag, *(self.path / model / tag for model in self._models)]
        files = (file for part in parts for file in part.rglob("*") if file.is_file())
        return {str(file.relative_to(self.path)): file.stat().st_size for file in files}

    def _tags(self) -> list[str]:
        return [path.name for path in self._directories(self.path / OURS) if TAG.fullmatch(path.name)]

    def _directories(self, path: Path) -> list[Path]:
        return sorted(child for child in path.iterdir() if child.is_dir()) if path.is_dir() else []

    def _number(self, tag: str) -> int:
        """Return the number (from 1) of `tag` among all completed checkpoints; 0 if it was never completed."""
        return int(self._complete(tag).get("number", 0))

    def _complete(self, tag: str) -> dict[str, Any]:
        path = self.ours(tag) / COMPLETE
        return dict(json.loads(path.read_text())) if path.exists() else {}


def _step(tag: str) -> int:
    match = TAG.match(tag)
    return int(match["step"]) if match else 0


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    write_atomically(path, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")


def write_atomically(path: Path, content: bytes) -> None:
    """Write bytes to a file that is there whole or not at all, also after a power cut."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
