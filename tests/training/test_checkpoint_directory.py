"""The newest complete checkpoint is found, wherever a kill came."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.training import checkpoint_directory
from rhyme_openrlhf.training.checkpoint_directory import (
    BEST,
    COMPLETE,
    CRITIC,
    LATEST,
    POLICY,
    CheckpointDirectory,
    tag_of,
)
from tests.examples import examples

FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt")


class Killed(Exception):
    """Stands for SIGKILL: nothing after it happens."""


class Run:
    """A run that saves as OpenRLHF does (old best and surplus ones deleted first), and is killed somewhere in it.

    A place to be killed at is every write and deletion of OpenRLHF's, and every line of ours.
    """

    def __init__(self, path: Path, critic: bool, max_num: int) -> None:
        self.path = path
        self.directory = CheckpointDirectory(path, critic)
        self._models = (POLICY, CRITIC) if critic else (POLICY,)
        self._max_num = max_num
        self._writes_left = 10**9
        self.begun: list[str] = []
        self.completed: list[str] = []

    def kill_after(self, writes: int) -> None:
        self._writes_left = writes

    def _write(self) -> None:
        if self._writes_left == 0:
            raise Killed
        self._writes_left -= 1

    def _delete(self, directory: Path) -> None:
        for file in sorted(directory.iterdir()):
            self._write()
            file.unlink()
        directory.rmdir()

    def save(self, tag: str) -> None:
        self._to_be_killed(lambda: self._save(tag))

    def start(self) -> None:
        """What the driver does, killed somewhere in it."""

        def resume() -> None:
            self.directory.tidy()
            newest = self.directory.newest()
            if newest is not None:
                self.directory.use(newest)

        with contextlib.suppress(Killed):
            self._to_be_killed(resume)

    def _to_be_killed(self, act: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            act()
        finally:
            sys.settrace(before)

    def _trace(self, frame: types.FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != checkpoint_directory.__file__:
            return None
        if event == "line":
            self._write()
        return self._trace

    def _save(self, tag: str) -> None:
        self._write()
        self.begun.append(tag)
        ours = self.directory.begin(tag)
        self._write()
        (ours / "state.json").write_text("{}")
        for model in self._models:
            below = self.path / model
            below.mkdir(exist_ok=True)
            found = [one for one in below.iterdir() if one.is_dir()]
            if tag.startswith(BEST):
                for old in found:
                    if old.name.startswith(BEST) and old.name != tag:
                        self._delete(old)
            else:
                regular = sorted(
                    (one for one in found if not one.name.startswith(BEST)), key=lambda p: p.stat().st_mtime_ns
                )
                for old in regular[: max(0, len(regular) - self._max_num + 1)]:
                    self._delete(old)
            (below / tag).mkdir(exist_ok=True)
            for name in FILES:
                self._write()
                (below / tag / name).write_text(tag * 2)
            self._write()
            (below / LATEST).write_text(tag)
        self._write()
        assert self.directory.commit(tag)
        self.completed.append(tag)


def is_best(name: str) -> bool:
    return name.startswith(BEST)


@settings(max_examples=examples(150), deadline=None)
@given(
    st.booleans(),
    st.integers(2, 3),
    st.lists(st.lists(st.booleans(), min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 600), min_size=3, max_size=3),
)
def test_a_kill_at_any_point_leaves_the_checkpoint_before(
    tmp_path_factory: pytest.TempPathFactory, critic: bool, max_num: int, lives: list[list[bool]], kills: list[int]
) -> None:
    """Several lives, each resumed from what the last left, saving ordinary and best checkpoints, then killed."""
    run = Run(tmp_path_factory.mktemp("ckpt"), critic, max_num)
    step = 0
    for life, kill in zip(lives, kills, strict=False):
        run.kill_after(kill)
        with contextlib.suppress(Killed):
            for best in life:
                step += 1
                run.save(tag_of(step))
                if best:
                    run.save(BEST + tag_of(step))
        run.kill_after(kill // 3)
        run.start()
        run.directory.tidy()
        newest = run.directory.newest()
        if newest is None:
            assert not run.completed
            run.directory.remove_incomplete()
            step = 0
            continue
        # Or one more: killed when it was complete, but before its save returned.
        assert newest.complete and newest.name in (run.completed[-1:] + run.begun[-1:])
        assert newest.name == run.begun[-1] or run.begun[-1] not in run.completed
        run.completed.append(newest.name)
        run.directory.use(newest)
        step = newest.step
        for model in run._models:
            assert (run.path / model / LATEST).read_text() == newest.name
            # Everything that is left can be resumed from, or is plain OpenRLHF's.
            left = [one.name for one in (run.path / model).iterdir() if one.is_dir()]
            assert newest.name in left and all(run.directory.is_complete(name) for name in left)
            # A best one, once there, is there until the next is complete.
            assert any(map(is_best, left)) or not any(map(is_best, run.completed))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path, critic=True, max_num=3)
    made.save("global_step1")
    made.save("global_step2")
    return made


def test_the_checkpoint_that_was_completed_last_is_the_newest(run: Run) -> None:
    # A run that started anew on the same path: its first step is newer than the old second.
    run.save("global_step1")
    newest = run.directory.newest()
    assert newest is not None and (newest.name, newest.step) == ("global_step1", 1)
    run.save("best_global_step1")
    newest = run.directory.newest()
    assert newest is not None and (newest.name, newest.step) == ("best_global_step1", 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / POLICY / "global_step2" / FILES[0]).unlink(),
        lambda path: (path / CRITIC / "global_step2" / FILES[1]).write_text("torn"),
        lambda path: shutil.rmtree(path / CRITIC / "global_step2"),
        lambda path: (path / "_rhyme" / "global_step2" / "state.json").unlink(),
        lambda path: (path / "_rhyme" / "global_step2" / COMPLETE).unlink(),
    ],
)
def test_what_is_not_whole_is_not_taken_and_is_deleted(run: Run, damage: Callable[[Path], None]) -> None:
    damage(run.path)
    newest = run.directory.newest()
    assert newest is not None and newest.name == "global_step1"
    assert run.directory.use(newest) == ["global_step2"]
    for model in (POLICY, CRITIC):
        assert not (run.path / model / "global_step2").exists()
        assert (run.path / model / LATEST).read_text() == "global_step1"


def test_a_run_without_the_critic_deletes_nothing_of_one_with_it(run: Run) -> None:
    without = CheckpointDirectory(run.path, critic=False)
    newest = without.newest()
    assert newest is not None and without.use(newest) == []


def test_ours_goes_with_what_openrlhf_deletes(run: Run) -> None:
    for step in (3, 4, 5):
        run.save(tag_of(step))
    kept = {path.name for path in (run.path / "_rhyme").iterdir()}
    assert kept == {path.name for path in (run.path / POLICY).iterdir() if path.is_dir()} == {
        "global_step3", "global_step4", "global_step5",
    }  # fmt: skip


def test_plain_openrlhfs_checkpoint_is_taken_if_it_was_written_last(run: Run) -> None:
    for model in (POLICY, CRITIC):
        (run.path / model / "global_step7").mkdir()
        (run.path / model / LATEST).write_text("global_step7")
    newest = run.directory.newest()
    assert newest is not None and (newest.name, newest.step, newest.complete) == ("global_step7", 7, False)
    run.save("global_step8")
    newest = run.directory.newest()
    assert newest is not None and newest.name == "global_step8"


def test_a_checkpoint_that_cannot_be_seen_is_not_complete(tmp_path: Path) -> None:
    directory = CheckpointDirectory(tmp_path, critic=False)
    directory.begin("global_step1")
    assert not directory.commit("global_step1")
    assert directory.newest() is None


def test_the_mark_lists_every_file(run: Run) -> None:
    mark = json.loads((run.directory.ours("global_step2") / COMPLETE).read_text())
    assert mark["number"] == 2 and len(mark["files"]) == 5
