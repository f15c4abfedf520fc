"""A reproducible run trains the same in any order in which samples end, and on any number of engines.

The samples are recorded: a prompt has the same ones whenever it comes and wherever it goes, as its seeds have it. Some
of these tests train a real model in this process: losses, gradient norms and the weights of the end are equal, bit by
bit.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

import torch

from rhyme_openrlhf import embedded
from rhyme_openrlhf.telemetry.events import TrainStep
from rhyme_openrlhf.training import samples_generator, trainer
from rhyme_openrlhf.training.model_actors import RhymePolicyModelActor
from rhyme_openrlhf.training.samples_generator import RhymeSamplesGenerator
from tests.examples import examples
from tests.pipeline.recorded_run import Loader
from tests.training.one_process import SAMPLES, Model, arguments, make_model, one_rank, responses, services_of

# What a step trains: of each sample, its row and its tokens.
Batch = list[tuple[str, list[int]]]


class Watch:
    """A watch of a rollout stage that looks at nothing."""

    started = ended = seconds = 0.0

    def __init__(self, *_: Any) -> None:
        pass

    def begin(self, step: int, samples: int) -> None:
        pass

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Engines:
    """Engines whose responses end in an order by chance."""

    def __init__(self, count: int, order: int) -> None:
        self.chance = random.Random(order)
        self.handles = [
            NS(
                generate_responses=NS(remote=lambda prompt, label, **_: responses(label, prompt.visit)),
                get_num_unfinished_requests=NS(remote=lambda: 0),
                begin_rollout=NS(remote=lambda: None),
                trace_prompts=NS(remote=lambda keys: None),
                # As a lost one, which has nothing to report.
                rollout_report=NS(remote=lambda *_: None),
            )
            for _ in range(count)
        ]

    def wait(self, refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        chosen = refs.pop(self.chance.randrange(len(refs)))
        return [chosen], refs


@functools.cache
def parsed(folder: Path) -> Any:
    return arguments(
        folder, "--run.reproducible", "--weights.check_syncs", "0", "--train.num_episodes", "2",
        "--rollout.batch_size", "3", "--rollout.n_samples_per_prompt", f"{SAMPLES}", "--rollout.micro_batch_size", "2",
        "--train.batch_size", "6", "--train.micro_batch_size", "3",
    )  # fmt: skip


def options(folder: Path, ahead: int, filters: bool) -> Any:
    """`ahead`: for how many steps samples are generated at once."""
    args = copy.deepcopy(parsed(folder))
    args.rollout.vllm_generate_batch_size = args.rollout.batch_size * ahead
    args.algo.dynamic_filtering_enable, args.algo.dynamic_filtering_range = filters, (0.35, 0.65)
    return args


def rows(count: int, texts: int) -> list[tuple[str, str]]:
    """Return rows with a label each; `texts`: how many different prompts they have."""
    return [(f"prompt {row * 7 % count % texts}", f"{row}") for row in range(count)]


def batch_of(samples: list[Any]) -> Batch:
    return [(sample.labels[0], sample.sequences[0].tolist()) for sample in samples]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(1, 14), st.integers(1, 14), st.integers(1, 3), st.booleans(), st.integers(0, 1 << 16))
def test_batches_are_those_of_any_order(
    folder: Path, prompts: int, texts: int, ahead: int, filters: bool, order: int
) -> None:
    """Also where samples are generated for several steps at once, and where rows have the same prompt."""

    def batches(engines: Engines) -> list[Batch]:
        args = options(folder, ahead, filters)
        loader = Loader(rows(prompts, min(texts, prompts)))
        generator = RhymeSamplesGenerator(
            NS(args=args), loader, None, None, engines.handles, services=services_of(args, [])
        )
        found = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ray, "get", lambda refs, timeout=None: refs)
            patch.setattr(ray, "wait", engines.wait)
            patch.setattr(samples_generator, "RolloutWatch", Watch)
            for _ in range(2):
                exhausted = False
                while not exhausted:
                    samples, _, _, exhausted = generator.generate_samples(max_len=args.data.max_len)
                    found += [batch_of(samples)] if samples else []
        return found

    assert batches(Engines(3, order)) == batches(Engines(1, order + 1)) != []


def trained(args: Any, engines: Engines) -> tuple[list[Batch], list[TrainStep], Model]:
    """Train a real model on what these engines generate; return each step's samples, its record, and the model."""
    events: list[Any] = []
    services = services_of(args, events)
    policy = make_model(RhymePolicyModelActor, args, services, None)
    found: list[Batch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "wait", engines.wait)
        patch.setattr(samples_generator, "RolloutWatch", Watch)
        patch.setattr(trainer.upstream, "prepare_datasets", lambda *_: (Loader(rows(14, 14)), None, 100))
        for name in ("wait_for_engines", "install_profiles"):
            patch.setattr(trainer, name, lambda *_: None)
        patch.setattr(trainer.RhymeTraining, "broadcast_to_vllm", lambda self: None)
        own = trainer.upstream.BasePPOTrainer.train_step

        def train_step(self: Any, samples: list[Any], step: int) -> Any:
            found.append(batch_of(samples))
            return own(self, samples, step)

        patch.setattr(trainer.upstream.BasePPOTrainer, "train_step", train_step)
        run = trainer.RhymePPOTrainer(
            str(embedded.MODEL), policy.actor.strategy, policy.group(), None, None, None, engines.handles,
            max_len=args.data.max_len,
        )  # fmt: skip
        run.fit()
    return found, [event for event in events if isinstance(event, TrainStep)], policy


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.parametrize(("ahead", "filters"), [(1, True), (2, False)])
def test_losses_and_weights_are_those_of_any_order(
    process_group: None, tmp_path: Path, ahead: int, filters: bool
) -> None:
    (batches, steps, model), (other_batches, other_steps, other) = (
        trained(options(tmp_path, ahead, filters), Engines(count, order)) for count, order in ((3, 1), (1, 2))
    )
    assert batches == other_batches and len(steps) == len(batches) >= 4
    for one, two in zip(steps, other_steps, strict=True):
        assert one.metrics == two.metrics
    assert model.updates == other.updates and all(norm for _, norm in model.updates)
    weights = other.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.weights().items())
