"""A checkpoint's part beside OpenRLHF's: real Ray and history workers; models that only write a file."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any

import pytest

ray = pytest.importorskip("ray")

from rhyme_openrlhf.platform import gpu_present, shims  # noqa: E402

if not gpu_present():
    shims.install()

from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController  # noqa: E402

from rhyme_openrlhf.history.index import Piece  # noqa: E402
from rhyme_openrlhf.history.worker import PromptRollout  # noqa: E402
from rhyme_openrlhf.history.workers import start_history_workers  # noqa: E402
from rhyme_openrlhf.settings.history import HistorySettings  # noqa: E402
from rhyme_openrlhf.telemetry.events import CheckpointSaved, Note  # noqa: E402
from rhyme_openrlhf.telemetry.services import Checkpoints, ResumePoint  # noqa: E402
from rhyme_openrlhf.training.checkpoint import CheckpointError, RunCheckpoints  # noqa: E402
from rhyme_openrlhf.training.checkpoint_directory import CheckpointDirectory  # noqa: E402
from rhyme_openrlhf.training.reproducible import RankRandomState  # noqa: E402
from rhyme_openrlhf.training.samples_generator import GeneratorState  # noqa: E402


def states() -> dict[str, Any]:
    return {"episode": 0, "global_step": 3, "data_loader_state_dict": {"yielded": 12}}


@ray.remote(num_cpus=0)
class Rank(RankRandomState):
    """One rank of a model, as far as a checkpoint goes."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._spoilt = ""
        random.seed(rank)

    def write_to(self, path: Path) -> None:
        self._path = path

    def draw(self) -> float:
        return random.random()

    def spoil(self, weight: str) -> None:
        self._spoilt = weight

    def not_finite(self) -> str:
        return self._spoilt

    def save_checkpoint(self, tag: str, client_states: dict[str, Any] | None = None) -> None:
        (self._path / tag).mkdir(parents=True, exist_ok=True)
        (self._path / tag / f"rank-{self._rank}.pt").write_text(str(client_states))


class Group:
    """Upstream's actor group: a method on all ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = [Rank.remote(rank) for rank in range(ranks)]

    def async_run_method(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        return [getattr(rank, method_name).remote(*args, **kwargs) for rank in self.ranks]

    def draw(self) -> list[float]:
        return ray.get(self.async_run_method("draw"))


@pytest.fixture(scope="module")
def models(starts_ray: None) -> Iterator[tuple[Group, Group]]:
    """Policy and critic, for all tests: each rank is a process that imports torch."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield Group(2), Group(1)
    ray.shutdown()


class Run:
    """A trainer's surroundings on one checkpoint path."""

    def __init__(
        self, models: tuple[Group, Group], path: Path, name: str = "first", resume: ResumePoint | None = None
    ) -> None:
        self.path = path
        self.events: list[Any] = []
        self.policy, self.critic = models
        ray.get(self.policy.async_run_method("write_to", path / "_actor"))
        ray.get(self.critic.async_run_method("write_to", path / "_critic"))
        saved = resume.history if resume else ()
        self.workers = start_history_workers(HistorySettings(cpus_per_worker=0.1), path / name, saved)
        services = NS(
            checkpoints=Checkpoints(resume, {"--rollout.batch_size": 4}),
            history_workers=self.workers,
            checkpoint_path=str(path),
            record=lambda event, source: self.events.append(event),
        )
        args = NS(ckpt=NS(path=str(path), disable_ds=False))
        self.checkpoints = RunCheckpoints(services, args, self.policy, self.critic)

    def record(self, step: int, key: str) -> None:
        ray.get(self.workers[0].record.remote(step, [PromptRollout(key, (Piece([1], [2, 3], 1.0),), (2,))]))

    def complete(self, step: int, kl: float = 0.5) -> None:
        self.record(step, f"of step {step}")
        self.checkpoints.training_begins()
        given = states()
        self.checkpoints.step_completed(step, given, GeneratorState(step, {"prompt": 2}), kl)
        # The loader goes on.
        given["data_loader_state_dict"]["yielded"] = 16

    def newest(self) -> ResumePoint | None:
        tag = CheckpointDirectory(self.path, critic=True).newest()
        if tag is None:
            return None
        ours = self.path / "_rhyme" / tag.name
        return ResumePoint(tag.name, tag.step, ours, tuple(sorted(ours.glob("history-*"))))


def test_the_last_completed_step_is_saved_and_comes_back(models: Any, tmp_path: Path) -> None:
    run = Run(models, tmp_path)
    assert not run.checkpoints.save_now({}, "nothing was trained yet")
    run.complete(3, kl=0.7)
    # The next step's rollout failed after it was recorded.
    run.record(4, "of step 4")
    run.record(4, "of step 3")
    assert run.checkpoints.save_now({"best_eval_metric_value": 0.25}, "the rollout of step 4 failed")
    drawn = [run.policy.draw(), run.critic.draw()]
    assert [event.step for event in run.events if isinstance(event, CheckpointSaved)] == [3]
    assert [event.text for event in run.events if isinstance(event, Note)] == [
        "saved a checkpoint of step 3: the rollout of step 4 failed"
    ]
    told = (tmp_path / "_actor" / "global_step3" / "rank-1.pt").read_text()
    assert ast.literal_eval(told) == {**states(), "best_eval_metric_value": 0.25}
    saved = run.newest()
    assert saved is not None and (saved.tag, saved.step) == ("global_step3", 3)
    # Once more: it is there already, and nothing is written.
    assert run.checkpoints.save_now({}, "again") and len(run.events) == 3

    resumed = Run(models, tmp_path, "second", saved)
    kl = AdaptiveKLController(0.1, 6.0, 100)
    generator = resumed.checkpoints.restore(3, kl)
    assert (generator.step, generator.visits, kl.value) == (3, {"prompt": 2}, 0.7)
    assert [resumed.policy.draw(), resumed.critic.draw()] == drawn
    # Only what was recorded up to step 3.
    assert ray.get(resumed.workers[0].prompts.remote()) == 1
    assert resumed.events[-1].text == "history of 1 prompts restored"
    fixed = FixedKLController(0.01)
    resumed.checkpoints.restore(3, fixed)
    assert fixed.value == 0.01
    with pytest.raises(CheckpointError, match="OpenRLHF loaded the checkpoint of step 2"):
        resumed.checkpoints.restore(2, kl)


def test_nothing_is_saved_once_the_policy_is_being_trained(models: Any, tmp_path: Path) -> None:
    run = Run(models, tmp_path)
    run.complete(1)
    run.checkpoints.training_begins()
    assert not run.checkpoints.save_now({}, "training failed")
    assert run.newest() is None and not (tmp_path / "_rhyme").exists()


def test_a_save_that_fails_leaves_the_checkpoint_before(models: Any, tmp_path: Path) -> None:
    run = Run(models, tmp_path)
    run.complete(1)
    assert run.checkpoints.save_now({}, "to have one")
    run.complete(2)
    ray.get(run.critic.async_run_method("write_to", tmp_path / "_critic" / "global_step1" / "rank-0.pt"))
    assert not run.checkpoints.save_now({}, "the critic cannot write")
    assert run.events[-1].level == "warning" and "step 2" in run.events[-1].text
    saved = run.newest()
    assert saved is not None and saved.step == 1


def test_weights_that_are_not_finite_are_never_saved(models: Any, tmp_path: Path) -> None:
    run = Run(models, tmp_path)
    run.complete(1)
    assert run.checkpoints.save_now({}, "to have one")
    run.complete(2)
    ray.get(run.policy.ranks[1].spoil.remote("model.norm.weight"))
    refused = pytest.raises(CheckpointError, match=r"the policy's weights are not finite \(model.norm.weight\)")
    with refused, run.checkpoints.saving("global_step2"):
        raise AssertionError("OpenRLHF saves")
    assert not run.checkpoints.save_now({}, "the run failed")
    ray.get(run.policy.ranks[1].spoil.remote(""))
    saved = run.newest()
    assert saved is not None and saved.step == 1


def test_without_its_history_a_checkpoint_is_still_one(models: Any, tmp_path: Path) -> None:
    run = Run(models, tmp_path)
    run.complete(1)
    ray.kill(run.workers[0], no_restart=True)
    assert run.checkpoints.save_now({}, "to have one")
    saved = run.newest()
    assert saved is not None and saved.history == ()
    notes = [event.text for event in run.events if isinstance(event, Note)]
    assert "history worker 0 is not in checkpoint global_step1" in notes[0]
