"""Both trainers around OpenRLHF's update: a spoilt update goes no further, and a run without one has failed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.training.learning import Learning, LearningError
from rhyme_openrlhf.training.samples_generator import GeneratorState
from rhyme_openrlhf.training.trainer import RhymePPOTrainer
from rhyme_openrlhf.training.trainer_async import RhymeTrainingActor
from tests.training.test_learning import GOOD, arguments

TRAINERS = pytest.mark.parametrize("trainer_class", [RhymePPOTrainer, RhymeTrainingActor])

# Of a step of 16 samples (`training/updates.py`).
COUNTED = {"policy/optimizer_steps": 1.0}


def made(trainer_class: type, resumed_at: int = 0) -> Any:
    trainer: Any = trainer_class.__new__(trainer_class)
    trainer.recorded = []
    trainer.services = NS(
        record=lambda event, source: trainer.recorded.append(event), settings=NS(emulate=NS(train_s=0.0))
    )
    trainer.args = arguments()
    trainer._learning = Learning(trainer.args)
    trainer._updates = NS(now=lambda: "before", check=lambda *given: COUNTED if given[1:] == (16, "before") else {})
    trainer.experience_maker = NS(samples=16)
    trainer._restored_generator = GeneratorState(resumed_at)
    trainer.checked = []
    trainer._checkpoints = NS(training_begins=lambda: None, check_weights=lambda: trainer.checked.append("weights"))
    return trainer


@TRAINERS
def test_an_update_that_is_not_finite_ends_the_step(trainer_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer

    trainer = made(trainer_class)
    for step, figures in enumerate((GOOD, GOOD | {"actor_grad_norm": 0.0}, GOOD | {"policy_loss": math.nan})):
        monkeypatch.setattr(BasePPOTrainer, "ppo_train", lambda self, steps, figures=figures: dict(figures))
        if step < 2:
            assert trainer.ppo_train(step) == figures | COUNTED
            continue
        with pytest.raises(LearningError, match="step 3 gave policy_loss nan"):
            trainer.ppo_train(step)
    assert [event.level for event in trainer.recorded if isinstance(event, Note)] == ["warning"]


@TRAINERS
@pytest.mark.parametrize(("metric", "saved"), [(0.6, True), (0.5, False), (math.nan, False), (math.inf, True)])
def test_only_a_better_evaluation_puts_the_best_checkpoint_aside(
    trainer_class: type, metric: float, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import contextmanager

    from openrlhf.trainer.ppo_trainer import BasePPOTrainer

    trainer, done = made(trainer_class), []

    @contextmanager
    def saving(tag: str) -> Iterator[None]:
        done.append(tag)
        yield

    monkeypatch.setattr(BasePPOTrainer, "save_best_checkpoint", lambda self, *rest: done.append("upstream"))
    trainer._checkpoints.saving = saving
    trainer.best_eval_metric_key, trainer.best_eval_metric_value = "pass1", 0.5
    trainer.save_best_checkpoint({"pass1": metric}, 3)
    assert done == (["best_global_step3", "upstream"] if saved else ["upstream"])


@TRAINERS
def test_a_run_without_an_update_has_failed_unless_it_resumed_at_its_end(trainer_class: type) -> None:
    with pytest.raises(LearningError, match="without a training step"):
        made(trainer_class).finish_training()
    resumed = made(trainer_class, resumed_at=7)
    resumed.finish_training()
    assert resumed.checked == ["weights"]
