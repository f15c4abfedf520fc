"""Faults and warnings of training steps that taught nothing, or spoilt the policy."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from rhyme_openrlhf.training.learning import GRADIENTS, LOSSES, POLICY_UPDATES, Learning, LearningError


def arguments(dtype: str = "bf16", filtering: bool = False, freezing: int = -1) -> SimpleNamespace:
    return SimpleNamespace(
        ds=SimpleNamespace(param_dtype=dtype),
        critic=SimpleNamespace(freezing_steps=freezing),
        train=SimpleNamespace(micro_batch_size=8, batch_size=16),
        rollout=SimpleNamespace(batch_size=4, n_samples_per_prompt=4),
        actor=SimpleNamespace(adam=SimpleNamespace(lr=1e-30)),
        algo=SimpleNamespace(dynamic_filtering_enable=filtering, dynamic_filtering_range=(0.0, 1.0)),
    )


GOOD = {"policy_loss": 0.1, "actor_grad_norm": 0.5, "kl": 0.0}


@pytest.mark.parametrize("name", [*LOSSES, *GRADIENTS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_figure_that_is_not_finite_ends_the_run(name: str, value: float) -> None:
    sut = Learning(arguments())
    assert not list(sut.updated(1, GOOD))
    with pytest.raises(LearningError, match=rf"step 2 gave {name} {value}"):
        list(sut.updated(2, GOOD | {name: value}))


def test_an_overflow_with_fp16_is_deepspeeds_to_handle() -> None:
    sut = Learning(arguments("fp16"))
    assert not list(sut.updated(1, GOOD | {"actor_grad_norm": math.inf}))
    with pytest.raises(LearningError):
        list(sut.updated(2, GOOD | {"policy_loss": math.nan}))


def test_a_step_without_an_update_is_a_warning_once_and_a_run_of_them_has_failed() -> None:
    sut = Learning(arguments())
    (warning,) = [text for step in (1, 2, 3) for text in sut.updated(step, {})]
    assert "step 1 did not update the policy" in warning and "--train.micro_batch_size 8" in warning
    with pytest.raises(LearningError, match="made 3 steps, and none updated the policy"):
        sut.run_ended()
    list(sut.updated(4, GOOD))
    sut.run_ended()


def test_micro_batches_without_an_optimizer_step_are_no_update() -> None:
    """A run of one step of 12 samples with --train.batch_size 16: there is a loss, and the weights are as they were."""
    sut = Learning(arguments())
    assert not list(sut.updated(1, GOOD | {"actor_grad_norm": 0.0, POLICY_UPDATES: 0.0}))
    with pytest.raises(LearningError, match=r"made 1 steps, and none updated .* --train.batch_size \(16\)"):
        sut.run_ended()
    list(sut.updated(2, GOOD | {POLICY_UPDATES: 1.0}))
    sut.run_ended()


def test_a_run_whose_updates_changed_no_weight_has_failed() -> None:
    sut = Learning(arguments())
    assert not list(sut.weights_compared(True))
    list(sut.updated(1, GOOD))
    (warning,) = sut.weights_compared(True)
    assert "1 training step updated the policy, and none of its weights changed" in warning
    list(sut.updated(2, GOOD))
    with pytest.raises(LearningError, match=r"2 training steps updated .*--actor.adam.lr 1e-30\)"):
        list(sut.weights_compared(True))
    assert not list(sut.weights_compared(False))


def test_rewards_that_overflow_are_a_warning_once() -> None:
    sut = Learning(arguments())
    (warning,) = [text for step in (1, 2) for text in sut.updated(step, GOOD | {"reward": math.inf})]
    assert "step 1 has a mean reward of inf" in warning


def test_steps_with_a_frozen_policy_are_what_was_asked_for() -> None:
    sut = Learning(arguments(freezing=1))
    assert not [text for step in (1, 2) for text in sut.updated(step, {"critic_loss": 0.2})]
    sut.run_ended()
    assert list(sut.updated(3, {"critic_loss": 0.2}))


def test_a_gradient_of_zero_is_a_warning_once() -> None:
    sut = Learning(arguments())
    (warning,) = [text for step in (1, 2) for text in sut.updated(step, GOOD | {"actor_grad_norm": 0.0})]
    assert "its gradient is 0" in warning
    sut.run_ended()


def test_a_run_without_a_step_names_the_filter() -> None:
    with pytest.raises(LearningError, match=r"without a training step.*between 0 and 1 .*dynamic_filtering_range"):
        Learning(arguments(filtering=True)).run_ended()


def test_an_epoch_whose_prompts_were_mostly_filtered_out_is_a_warning() -> None:
    sut = Learning(arguments(filtering=True))
    # Prompts drawn in all, with each step of 16 samples, so of 4 prompts.
    steps = [(1, 6), (1, 12), (2, 24), (2, 40), (3, 44)]
    said = [list(sut.step_completed(epoch, drawn, 16)) for epoch, drawn in steps]
    assert said == [[], [], [], [], [said[4][0]]]
    assert said[4][0].startswith("epoch 2 trained on 8 of 28 prompts")
    assert not list(sut.epoch_ended())


def test_a_resumed_run_counts_from_its_checkpoint() -> None:
    sut = Learning(arguments(filtering=True))
    sut.resumed(1000)
    assert not list(sut.step_completed(7, 1006, 16)) and not list(sut.epoch_ended())
