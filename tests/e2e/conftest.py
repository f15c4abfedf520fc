"""Whole training runs on real Ray, DeepSpeed and vLLM: small ones, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli.demo import arguments
from rhyme_openrlhf.shared_files import SHARED_MEMORY, process_started
from rhyme_openrlhf.telemetry.event_log import read_events
from rhyme_openrlhf.telemetry.events import Event
from tests.e2e.plane import Plane

# A run takes one to two minutes on two idle cores; machines are not always idle.
RUN_TIMEOUT_S = 480

# 8 short prompts x 4 samples, two steps an epoch: enough to see history work, quick enough to do often.
SMALL = ["--rollout.batch_size", "4", "--rollout.n_samples_per_prompt", "4", "--rollout.micro_batch_size", "8"]
SMALL += ["--train.batch_size", "16", "--train.micro_batch_size", "8", "--train.num_episodes", "2"]
SMALL += ["--data.max_len", "160", "--rollout.max_new_tokens", "100", "--run.reproducible"]


@dataclass(frozen=True)
class FinishedRun:
    """A run that ended: its directory, exit code, what it printed, and its events."""

    path: Path
    code: int
    output: str
    events: list[Event]

    def of(self, kind: type) -> list[Any]:
        """Its events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def left_in_shared_memory() -> set[str]:
    """Our files there whose process is gone; those of tests that run beside this one are in use."""
    names = {path.name for path in SHARED_MEMORY.glob("rhyme-*")}
    owners = {name: re.match(r"rhyme-[a-z]+-(\d+)-(\d+)-", name) for name in names}
    return {name for name, owner in owners.items() if not owner or process_started(int(owner[1])) != int(owner[2])}


@pytest.fixture(scope="session")
def small_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The eight embedded prompts with the shortest texts."""
    rows = (embedded.DATA / "mixed_train.jsonl").read_text().splitlines()
    path = tmp_path_factory.mktemp("data") / "small.jsonl"
    path.write_text("\n".join(sorted(rows, key=lambda row: len(json.loads(row)["input"]))[:8]) + "\n")
    return path


@pytest.fixture
def small_options() -> list[str]:
    """The options that make a run small."""
    return list(SMALL)


@pytest.fixture
def train(tmp_path: Path, small_prompts: Path, starts_e2e: None) -> Callable[..., FinishedRun]:
    """Run `rhyme train` on the small set with more options, in a run directory `name`; returns when it has ended."""

    def run(*options: str, name: str = "run") -> FinishedRun:
        directory = tmp_path / name
        argv = [*arguments(str(tmp_path / "ckpt")), "--data.prompt_dataset", str(small_prompts), *SMALL]
        done = subprocess.run(
            [sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv, "--run.dir", str(directory), *options],
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            cwd=tmp_path,
        )
        log = directory / "events.jsonl"
        events = [recorded.event for recorded in read_events(log)] if log.exists() else []
        return FinishedRun(directory, done.returncode, done.stdout + done.stderr, events)

    return run


@pytest.fixture
def plane(tmp_path: Path, small_prompts: Path, starts_e2e: None, starts_service: None) -> Iterator[Plane]:
    """A service that starts runs; its Ray ends with it."""
    plane = Plane(tmp_path, [tmp_path, small_prompts.parent])
    yield plane
    plane.end()
