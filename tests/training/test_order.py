"""A reproducible run trains the same in any order in which samples end, and on any number of engines.

The samples are recorded: a prompt has the same ones whenever it comes and wherever it goes, as its seeds have it. Some
of these tests train a real model in this process: losses, gradient norms and the weights of the end are equal, bit by
bit.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import shutil
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
from transformers import AutoConfig, AutoModelForCausalLM

from rhyme_openrlhf import embedded
from rhyme_openrlhf.telemetry.events import TrainStep
from rhyme_openrlhf.training import samples_generator, trainer
from rhyme_openrlhf.training.model_actors import RhymePolicyModelActor
from rhyme_openrlhf.training.samples_generator import RhymeSamplesGenerator
from tests.examples import examples
from tests.pipeline.recorded_run import Loader
from tests.training.one_process import (
    LAST_TOKEN,
    SAMPLES,
    Model,
    arguments,
    make_model,
    one_rank,
    responses,
    services_of,
)

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
    """Engines whose responses, in tokens up to `last_token`, end in an order by chance."""

    def __init__(self, count: int, order: int, last_token: int = LAST_TOKEN) -> None:
        self.chance = random.Random(order)

        def generate(prompt: str, label: str, **_: Any) -> Any:
            # Only a reproducible run's prompts carry their visit.
            return responses(label, getattr(prompt, "visit", 0), last_token)

        self.handles = [
            NS(
                generate_responses=NS(remote=generate),
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


def trained(
    args: Any, engines: Engines, weights: Path = embedded.MODEL, prompts: int = 14
) -> tuple[list[Batch], list[TrainStep], Model]:
    """Train a real model on what these engines generate; return each step's samples, its record, and the model."""
    events: list[Any] = []
    services = services_of(args, events)
    policy = make_model(RhymePolicyModelActor, args, services, None, weights=weights)
    found: list[Batch] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray, "wait", engines.wait)
        patch.setattr(samples_generator, "RolloutWatch", Watch)
        patch.setattr(trainer.upstream, "prepare_datasets", lambda *_: (Loader(rows(prompts, prompts)), None, 100))
        for name in ("wait_for_engines", "install_profiles"):
            patch.setattr(trainer, name, lambda *_: None)
        patch.setattr(samples_generator.RhymeSamplesGenerator, "prepare", lambda self: None)
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


# Tokens of a real model's vocabulary; of the numbers' 16 bits, those behind the point are 8: a rounding is off by at
# most half of the last one.
VOCABULARY, ROUNDING = 32_768, 2.0**-9
# Roundings between a weight and its part of the loss, and back: about 12 in each of 4 layers, and a head.
ROUNDINGS = 2 * (4 * 12 + 4)


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's layers, with random weights and 32K tokens."""
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(embedded.MODEL, vocab_size=VOCABULARY)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in embedded.MODEL.glob("*token*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def test_16_bits_and_32k_tokens_train_the_same_in_any_order_but_for_roundings(
    process_group: None, tmp_path: Path, wide_model: Path
) -> None:
    """Without `--run.reproducible` a step trains its samples as they end, so other ones stand in a micro-batch.

    Roundings add up like a walk by chance: the gradient's norm, of a million numbers, differs by less than the root of
    their number. A sample left out, or trained twice, makes a difference of one in twelve.
    """
    args = options(tmp_path, 1, False)
    args.run.reproducible, args.ds.param_dtype, args.train.num_episodes = False, "bf16", 1
    batches, norms = [], []
    for count, order in ((3, 0), (1, 2)):
        found, _, model = trained(args, Engines(count, order, VOCABULARY - 1), wide_model, prompts=3)
        batches += found
        norms += [norm for _, norm in model.updates]
        assert all(weight.dtype == torch.bfloat16 for weight in model.weights().values())
    assert len(batches) == len(norms) == 2
    assert batches[0] != batches[1] and sorted(batches[0]) == sorted(batches[1])
    assert norms[0] == pytest.approx(norms[1], rel=math.sqrt(ROUNDINGS) * ROUNDING)
