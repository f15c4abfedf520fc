"""OpenRLHF's model actors and trainers in this process: real models, real DeepSpeed, one rank, and no Ray.

A call to an actor is made at once, so Ray's references are values. What the optimizer did is noted, update by update.
Samples to train on are recorded ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist

from rhyme_openrlhf import embedded
from rhyme_openrlhf.cli import upstream as command_line
from rhyme_openrlhf.cli.demo import arguments as demo_arguments
from rhyme_openrlhf.platform.cpu_arguments import adapt_arguments
from rhyme_openrlhf.platform.cpu_strategy import cpu_strategy  # first: installs the shims
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.services import Checkpoints, RunServices

from openrlhf.trainer.ray.launcher import RayActorGroup  # isort: skip

# Of each prompt.
SAMPLES = 2
# One optimizer step: the losses of its micro-batches, and the gradient's norm.
Update = tuple[list[float], float]


@contextmanager
def one_rank() -> Iterator[None]:
    """Have torch's process group with this process alone, on a store in memory; leave nothing of it."""
    import deepspeed
    from deepspeed.utils import groups

    threads = torch.get_num_threads()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "")
        # DeepSpeed keeps groups for as long as the process lives.
        for name in ("_WORLD_GROUP", "_DATA_PARALLEL_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP"):
            patch.setattr(groups, name, None)
        patch.setattr(ray, "put", lambda value: value)
        patch.setattr(ray, "get", lambda refs, timeout=None: refs)
        try:
            yield
        finally:
            dist.destroy_process_group()
            deepspeed.comm.comm.cdb = None
            torch.set_num_threads(threads)


# The last token of the embedded model's vocabulary that a response may have.
LAST_TOKEN = 120


def responses(label: str, visit: int, last_token: int = LAST_TOKEN) -> list[dict[str, Any]]:
    """Return a prompt group's samples, in tokens up to `last_token`, as an engine gives them."""
    chance = random.Random(f"{label} {visit}")
    prompt = [chance.randint(5, last_token) for _ in range(chance.randint(2, 5))]
    found = []
    for _ in range(SAMPLES):
        response = [chance.randint(5, last_token) for _ in range(chance.randint(1, 9))]
        score = chance.random()
        log_probs = [0.0] * len(prompt) + [-4 * chance.random() for _ in response]
        found.append(
            {
                "prompt": f"prompt {label}", "label": label, "images": None, "mm_train_inputs": None,
                "observation_tokens": prompt + response, "action_ranges": [(len(prompt), len(prompt) + len(response))],
                "rollout_log_probs": log_probs, "reward": score, "scores": score, "truncated": False, "extra_logs": {},
            }
        )  # fmt: skip
    return found


def arguments(folder: Path, *options: str) -> Any:
    """Return `rhyme train`'s arguments for the embedded model, with these options."""
    args = command_line.parse([*demo_arguments(str(folder)), *options])
    adapt_arguments(args)
    # As upstream's coordinator does.
    args.ckpt.save_steps = args.eval.steps = float("inf")
    return args


def services_of(args: Any, events: list[Any]) -> RunServices:
    """Return a run's services; what is recorded is added to `events`."""

    def noted(event: Any, source: str, at: float) -> None:
        events.extend(event if isinstance(event, list) else [event])

    ignored = NS(remote=lambda *_: None)
    recorder = NS(
        write=NS(remote=noted), write_all=NS(remote=noted), write_lengths=ignored, write_samples=ignored,
        write_sample_table=ignored, stop_requested=NS(remote=lambda: False),
    )  # fmt: skip
    return RunServices(RhymeSettings.from_namespace(args), recorder, (), None, "", False, Checkpoints(None, {}))


@dataclass
class Model:
    """A model's actor with what it was trained: `updates` are its optimizer steps, `waiting` the losses since."""

    actor: Any
    updates: list[Update] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    def group(self) -> Any:
        """Return it as upstream's group of actors, of one."""
        group = RayActorGroup.__new__(RayActorGroup)
        group._actor_handlers, group.duplicate_actors = [_Handle(self)], 1
        return group

    def weights(self) -> dict[str, torch.Tensor]:
        """Return its weights."""
        engine = self.actor.critic if hasattr(self.actor, "critic") else self.actor.actor.model
        return {name: tensor.clone() for name, tensor in engine.module.state_dict().items()}


class _Handle:
    """A Ray handle whose calls are made at once. Each training step's micro-batches come in an order of its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._steps = 0

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any, **named: Any) -> Any:
            if name == "fit":
                # The data loader's order is drawn from torch's generator, which both sides use for more than that.
                self._steps += 1
                torch.manual_seed(self._steps)
            return getattr(self._model.actor, name)(*given, **named)

        return NS(remote=remote)


def make_model(kind: Callable[..., Any], args: Any, services: Any, *more: Any, weights: Path = embedded.MODEL) -> Model:
    """Return a model of this actor class, with these weights."""
    strategy: Any = cpu_strategy(args)
    strategy.services = services
    strategy.print = lambda *_: None
    model = Model(kind(1, 0, "localhost", 1))
    backward, step = strategy.backward, strategy.optimizer_step

    def noted_backward(loss: Any, *given: Any, **named: Any) -> None:
        model.waiting.append(loss.item())
        backward(loss, *given, **named)

    def noted_step(optimizer: Any, trained: Any, *given: Any, **named: Any) -> None:
        engine = trained if hasattr(trained, "global_steps") else trained.model
        before = engine.global_steps
        step(optimizer, trained, *given, **named)
        if engine.global_steps > before:
            model.updates.append((model.waiting, strategy.get_grad_norm(trained)))
            model.waiting = []

    strategy.backward, strategy.optimizer_step = noted_backward, noted_step
    model.actor.init_model_from_pretrained(strategy, str(weights), 100, *more)
    return model
