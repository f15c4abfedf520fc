"""Whole training runs on real Ray, DeepSpeed and vLLM: small ones, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli.demo import arguments
from tests.e2e.plane import Plane
from tests.e2e.runs import RUN_TIMEOUT_S, SMALL, FinishedRun, KilledRun, events_of, stacks_of


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
        command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "train", *argv, "--run.dir", str(directory)]
        # A file, because a pipe would have to be read until the last process of a run that hangs has ended.
        printed = tmp_path / f"{name}.out"
        with printed.open("w") as output:
            process = subprocess.Popen([*command, *options], stdout=output, stderr=output, cwd=tmp_path)
            try:
                code = process.wait(RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                stacks = stacks_of(tmp_path)
                process.kill()
                pytest.fail(f"no end within {RUN_TIMEOUT_S} s:\n{printed.read_text()[-4000:]}\n{stacks}")
        return FinishedRun(directory, code, printed.read_text(), events_of(directory))

    return run


@pytest.fixture
def plane(tmp_path: Path, small_prompts: Path, starts_e2e: None, starts_service: None) -> Iterator[Plane]:
    """A service that starts runs; its Ray ends with it."""
    plane = Plane(tmp_path, [tmp_path, small_prompts.parent])
    yield plane
    plane.end()


@pytest.fixture
def start(tmp_path: Path, small_prompts: Path, starts_e2e: None) -> Iterator[Callable[..., KilledRun]]:
    """Start `rhyme train` on the small set, with the same checkpoint path as `train`."""
    started: list[KilledRun] = []

    def run(name: str, *options: str) -> KilledRun:
        argv = [*arguments(str(tmp_path / "ckpt")), "--data.prompt_dataset", str(small_prompts), *SMALL, *options]
        started.append(KilledRun(tmp_path / name, argv, tmp_path))
        return started[-1]

    yield run
    for one in started:
        one.kill()
