"""A stop request in the run directory ends the run between two steps, with a checkpoint, and is no failure."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace as NS

import pytest

pytest.importorskip("vllm")

import ray

from rhyme_openrlhf.telemetry.events import Note
from rhyme_openrlhf.telemetry.recorder import PlainRecorder
from rhyme_openrlhf.telemetry.run_directory import STOP_REQUEST, RunDirectory
from rhyme_openrlhf.training.failure import FAULTS, StopRequested, is_stop_request
from rhyme_openrlhf.training.trainer import RhymePPOTrainer
from rhyme_openrlhf.training.trainer_async import RhymePPOTrainerAsync, RhymeTrainingActor


def task_error(cause: Exception) -> ray.exceptions.RayTaskError:
    """What ray.get raises for an actor that raised `cause`."""
    error = ray.exceptions.RayTaskError("fit", f"Traceback\n{type(cause).__name__}: {cause}", cause)
    return error.as_instanceof_cause()


def test_the_recorder_sees_the_request(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    recorder = PlainRecorder(str(run.events))
    assert not recorder.stop_requested()
    run.stop_request.write_text("{}")
    assert recorder.stop_requested() and run.stop_request.name == STOP_REQUEST
    recorder.write(Note("info", "still writes"), "driver", 1.0)
    recorder.close()


@pytest.mark.parametrize("trainer_class", [RhymePPOTrainer, RhymeTrainingActor])
@pytest.mark.parametrize("requested", [False, True])
def test_a_trainer_stops_only_when_asked_and_saves_first(trainer_class: type, requested: bool) -> None:
    trainer = trainer_class.__new__(trainer_class)
    done: list[str] = []
    trainer.services = NS(stop_requested=lambda: requested)
    trainer.save_now = lambda reason: done.append(f"saved: {reason}")
    trainer.wandb_logger = None
    trainer.tensorboard_logger = NS(close=lambda: done.append("closed"))
    if not requested:
        trainer.stop_if_requested()
        assert done == []
        return
    with pytest.raises(StopRequested):
        trainer.stop_if_requested()
    assert done == ["saved: stopped on request", "closed"]


@pytest.mark.parametrize("trainer_class", [RhymePPOTrainer, RhymeTrainingActor])
def test_the_request_is_looked_for_after_each_step(trainer_class: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.trainer.ppo_trainer import BasePPOTrainer

    trainer = trainer_class.__new__(trainer_class)
    order: list[str] = []
    trainer.args = NS(ckpt=NS(save_steps=5), logger=NS(logging_steps=1))
    trainer.kl_ctl = NS(value=0.0)
    trainer._checkpoints = NS(step_completed=lambda *step: order.append("completed"))
    trainer.source = NS(state_after=lambda states: None)
    trainer.stop_if_requested = lambda: order.append("asked")
    monkeypatch.setattr(BasePPOTrainer, "save_logs_and_checkpoints", lambda *step: order.append("upstream"))
    trainer.save_logs_and_checkpoints(3, {}, {"global_step": 3})
    assert order == ["completed", "upstream", "asked"]


def test_a_stop_is_told_from_a_fault_through_every_actor() -> None:
    stop = task_error(StopRequested("stopped on request"))
    assert is_stop_request(StopRequested()) and is_stop_request(stop) and is_stop_request(task_error(stop))
    assert not is_stop_request(task_error(RuntimeError("engine died")))
    assert not isinstance(StopRequested(), FAULTS) and isinstance(stop, FAULTS)


@pytest.mark.parametrize(("cause", "saves"), [(StopRequested("x"), 0), (RuntimeError("engine died"), 1)])
def test_the_async_controller_saves_after_faults_only(
    cause: Exception, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openrlhf.trainer.ppo_trainer_async as upstream

    from rhyme_openrlhf.training import trainer_async

    def fit(self: object) -> None:
        raise task_error(cause)

    monkeypatch.setattr(trainer_async.PlainPPOTrainerAsync, "fit", fit)
    controller = RhymePPOTrainerAsync.__new__(RhymePPOTrainerAsync)
    saved: list[str] = []
    controller._save = saved.append
    with pytest.raises(ray.exceptions.RayTaskError):
        controller.fit()
    assert len(saved) == saves and upstream.TrainingActor is not None
