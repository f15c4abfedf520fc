"""The pipeline's training is OpenRLHF's own loop over the same samples: optimizer steps, micro-batches, losses,
gradient norms and weights are equal, bit by bit.

The samples are recorded. They go through the pipeline (generator, controller, stream, experience maker, trainer) in
any order, with late, filtered and deferred prompt groups. Then OpenRLHF's own trainer, actors and samples generator get
the prompts in the order in which the pipeline trained them. The models are real, in this process. Both sides do the
same operations in the same order on one thread, so there is no tolerance.
"""

from __future__ import annotations

import copy
import math
import queue
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any

import pytest
import ray

pytest.importorskip("vllm")

import torch

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.checked_reward import RewardLateError
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.pipeline.trainer import PipelineParts
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.events import TrainStep
from rhyme_openrlhf.training.model_actors import (
    PlainCriticModelActor,
    PlainPolicyModelActor,
    RhymeCriticModelActor,
    RhymePolicyModelActor,
)
from rhyme_openrlhf.training.trainer import PlainPPOTrainer, upstream
from rhyme_openrlhf.training.trainer_async import RhymeTrainingActor
from rhyme_openrlhf.weights.offers import WeightOffers
from tests.pipeline.recorded_run import Loader, RandomOrder, RecordedRun, Ref, steps_of
from tests.training.one_process import SAMPLES, Model, arguments, make_model, one_rank, responses, services_of

BATCH, EPOCHS = 4, 2
LATE = "the reward function judge.py did not answer within 30 s"


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    with one_rank():
        yield


class Faults(RandomOrder):
    """Some prompt groups have no reward in time, some teach nothing, some are far too long."""

    def __init__(self, seed: int, late: str, long: str) -> None:
        super().__init__(random.Random(seed))
        self.late, self.long = late.split(), long.split()

    def fate(self, ref: Ref) -> Exception | None:
        return RewardLateError(LATE) if ref.label in self.late else None

    def too_long(self, step: Step) -> list[int]:
        return [place for place in step.owed() if step.labels[place] in self.long]


class TrainedOrder(Loader):
    """Gives the prompts of each epoch in the order in which the pipeline trained them."""

    def __init__(self, trained: list[tuple[str, int]]) -> None:
        super().__init__([])
        self.trained, self.epoch = trained, -1

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        self.rows = [(f"prompt {label}", label) for label, epoch in self.trained if epoch == self.epoch]
        return super().__iter__()


def models(args: Any, services: Any, policy: Any, critic: Any, with_critic: bool) -> tuple[Model, Model | None]:
    made = make_model(policy, args, services, None)
    return made, make_model(critic, args, services) if with_critic else None


def group_of(model: Model | None) -> Any:
    return None if model is None else model.group()


def pipelined(args: Any, sent: list[Any], with_critic: bool) -> tuple[list[Model], list[TrainStep]]:
    """Train on what the controller sent; return the models, and the record of each step."""
    events: list[Any] = []
    services = services_of(args, events)
    policy, critic = models(args, services, RhymePolicyModelActor, RhymeCriticModelActor, with_critic)
    stream: queue.Queue[Any] = queue.Queue()
    for item in [*sent, "done"]:
        stream.put(item)
    trainer = RhymeTrainingActor(
        str(embedded.MODEL), policy.actor.strategy, policy.group(), group_of(critic), None, None, None,
        vllm_lock=None, rollout_queue=stream, rollout_slots=queue.Queue(), parts=PipelineParts,
    )  # fmt: skip
    trainer.fit()
    return [model for model in (policy, critic) if model], [e for e in events if isinstance(e, TrainStep)]


def own_loop(
    args: Any, trained: list[tuple[str, int]], with_critic: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Model], list[dict[str, Any]]]:
    """Have OpenRLHF generate and train on its own; `trained`: the prompts of each epoch in this order, and visits."""
    steps: list[dict[str, Any]] = []
    policy, critic = models(args, None, PlainPolicyModelActor, PlainCriticModelActor, with_critic)
    loader = TrainedOrder(trained)
    monkeypatch.setattr(upstream, "prepare_datasets", lambda *_: (loader, None, 100))
    trainer = PlainPPOTrainer(
        str(embedded.MODEL), policy.actor.strategy, policy.group(), group_of(critic), None, None, None,
        max_len=args.data.max_len,
    )  # fmt: skip
    # The trainer itself knows of no engines, to which it would bring weights.
    answer = NS(remote=lambda label, **_: responses(label, loader.epoch))
    idle = NS(remote=lambda: 0)
    trainer.samples_generator.vllm_engines = [NS(generate_responses=answer, get_num_unfinished_requests=idle)]
    trainer.save_logs_and_checkpoints = lambda step, status, states: steps.append(status)
    monkeypatch.setattr(ray, "wait", lambda refs, num_returns, timeout: (refs[:1], refs[1:]))
    trainer.fit()
    return [model for model in (policy, critic) if model], steps


# Prompts of an epoch, samples of an update, its micro-batches, and which rows are late, filtered out and far too long.
COURSES = {
    "whole": (12, 8, 1, "", "", ""),
    "whole, accumulated": (12, 8, 4, "", "", ""),
    "two updates a step": (12, 4, 2, "", "", ""),
    "partial": (10, 4, 4, "", "", ""),
    # An epoch's last step of six samples, updates of four: OpenRLHF itself applies two with the next step's.
    "partial, not divisible": (11, 4, 2, "", "", ""),
    "late": (14, 8, 4, "1 3", "", ""),
    "late in two steps": (16, 4, 2, "1 6", "", ""),
    "late at the end": (12, 4, 1, "8 11", "", ""),
    "filtered": (15, 8, 4, "", "0 2 5", ""),
    "late and filtered": (14, 4, 2, "2 10", "1 5", ""),
    "deferred": (12, 8, 4, "", "", "1 2 6"),
    "late and deferred": (16, 4, 2, "2 9", "", "2 1 6"),
}


@pytest.mark.parametrize("course", COURSES)
def test_a_streamed_run_is_openrlhfs_own_loop(course: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, update, accumulation, late, filtered, long = COURSES[course]
    with_critic = accumulation == 2
    options = [
        "--train.async_enable", "--histopipe.enable", "--weights.check_syncs", "0",
        "--train.num_episodes", f"{EPOCHS}", "--rollout.batch_size", f"{BATCH}",
        "--rollout.n_samples_per_prompt", f"{SAMPLES}", "--rollout.micro_batch_size", "2",
        "--train.batch_size", f"{update}", "--train.micro_batch_size", f"{update // accumulation}",
        "--algo.advantage.estimator", "gae" if with_critic else "group_norm",
    ]  # fmt: skip
    if with_critic:
        options += ["--critic.model_name_or_path", str(embedded.MODEL), "--critic.num_gpus_per_node", "1"]
    if filtered:
        options += ["--algo.dynamic_filtering_enable", "--algo.dynamic_filtering_range", "0", "1"]
    if long:
        options += ["--histopipe.defer"]
    args = arguments(tmp_path, *options)
    rows = [(f"prompt {row}", f"{row}") for row in range(prompts)]

    def samples_of(label: str, visit: int) -> list[dict[str, Any]]:
        found = responses(label, visit)
        for response in found:
            if label in filtered.split():
                response["scores"] = 1.0
        return found

    run = RecordedRun(args, RhymeSettings.from_namespace(args), Loader(rows), samples_of, Faults(7, late, long))
    run.go()
    steps = steps_of(run.sent)
    trained = [
        (sample.labels[0], end.client_states["episode"])
        for end, groups in steps
        for group in groups
        for sample in group.samples[:1]
    ]
    left_out = {*late.split(), *filtered.split()}
    assert sorted(trained) == sorted((label, n) for _, label in rows for n in range(EPOCHS) if label not in left_out)
    assert any(end.deferred for end, _ in steps) == bool(long)

    # There are no engines to bring weights to.
    monkeypatch.setattr(WeightOffers, "prepare", lambda self: None)
    ours, events = pipelined(copy.deepcopy(args), run.sent, with_critic)
    theirs, statuses = own_loop(args, trained, with_critic, monkeypatch)
    assert len(events) == len(statuses) == len(steps)
    for model, reference in zip(ours, theirs, strict=True):
        assert model.updates == reference.updates and model.waiting == reference.waiting
        assert all(len(losses) == accumulation and math.isfinite(norm) and norm for losses, norm in model.updates)
        weights, wanted = model.weights(), reference.weights()
        assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    for (_, groups), event, status in zip(steps, events, statuses, strict=True):
        for name in ("policy_loss", "actor_grad_norm", "critic_loss", "rollout/reward_mean", "rollout/num_samples"):
            assert event.metrics.get(name) == status.get(name), name
        if len(groups) * SAMPLES % update == 0 and "not divisible" not in course:
            whole = len(groups) * SAMPLES / update
            assert event.metrics["policy/optimizer_steps"] == whole
            assert event.metrics["policy/micro_batches"] == whole * accumulation
