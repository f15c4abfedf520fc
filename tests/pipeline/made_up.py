"""Made-up engines and a generator for the pipeline's controller: what they are given ends in any order."""

from __future__ import annotations

import random
from types import SimpleNamespace as NS
from typing import Any

import pytest
import ray

from rhyme_openrlhf.engine.calls import EngineHandle
from rhyme_openrlhf.engine.messages import TurnReport
from rhyme_openrlhf.engine_losses import EngineLosses, LostEngine
from rhyme_openrlhf.pipeline import controller as pipeline
from rhyme_openrlhf.pipeline import engines as pipeline_engines
from rhyme_openrlhf.pipeline.controller import Pipeline
from rhyme_openrlhf.pipeline.step import Step
from rhyme_openrlhf.scheduling.layouts import LayoutPlan
from rhyme_openrlhf.scheduling.step_plan import by_load
from rhyme_openrlhf.scheduling.turns import Turn
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round
from rhyme_openrlhf.training.samples_generator import GeneratorState
from tests.ray_handles import handle_of

ENGINES, SAMPLES = 2, 2


class Ref:
    """Stands for Ray's reference to `value`."""

    def __init__(self, value: Any) -> None:
        self.value = value


def an_engine(answer: Any) -> EngineHandle:
    """Return the handle of an engine that answers each call at once with `answer`."""
    handle: EngineHandle = handle_of(EngineHandle, lambda *_, **__: Ref(answer))
    return handle


class Gone(LostEngine):
    """A lost engine that answers None without Ray."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(number, reason)
        vars(self).update(vars(an_engine(None)))


class Losses(EngineLosses):
    """Finds the engines lost that are `dead`; those that only fail have something else."""

    def __init__(self) -> None:
        super().__init__()
        self.dead: set[int] = set()

    def look(self, engines: list[Any], wait_s: float = 0.0) -> list[LostEngine]:
        for number in self.dead:
            engines[number] = Gone(number, "it was killed")
            self.publish(number, "it was killed")
        return []


class Watch:
    """A watch of no engines."""

    def start(self) -> None:
        pass

    def begin(self, step: int, samples: int) -> None:
        pass

    def stop(self) -> None:
        pass


class Generator:
    """Prompts are numbers; responses are their samples, generated with the oldest weights that are allowed."""

    def __init__(self, filters: bool = False, train_batch: int = SAMPLES, prompts: int = 1, batch: int = 1) -> None:
        self.vllm_engines = [an_engine([]) for _ in range(ENGINES)]
        algo = NS(dynamic_filtering_enable=filters, dynamic_filtering_range=(0, 1))
        self.args = NS(
            rollout=NS(n_samples_per_prompt=SAMPLES, batch_size=batch), algo=algo, train=NS(batch_size=train_batch)
        )
        self.prompts_dataloader = range(prompts)
        self.handed: list[int] = []
        # Steps whose lengths were recorded, and of how many samples.
        self.lengths: list[tuple[int, int]] = []
        self.again: list[tuple[int, int, int]] = []
        self.placed: set[int] = set()
        # The scores of prompts' samples, where they have one.
        self.scores: dict[str, float] = {}
        # What prompts fail with, one after the other; an engine that is gone fails what it has.
        self.failing: dict[str, list[Exception]] = {}
        self.gone: set[int] = set()
        self.losses = Losses()
        self.unreached: set[int] = set()

    def begin(self, step: Step, turn: Turn, lengths: Any) -> None:
        self.handed.append(step.number)
        step.turn = turn

    def place(self, step: Step, places: Any) -> dict[int, Exception]:
        failures: dict[int, Exception] = {}
        for place in places:
            if step.engine_of[place] in self.unreached:
                failures[step.engine_of[place]] = ray.exceptions.RayActorError()
                continue
            if step.attempts[place] or step.number in self.placed:
                self.again.append((step.number, place, step.engine_of[place]))
            step.attempts[place] += 1
            self.send(step, place, step.engine_of[place])
        for engine in {step.engine_of[place] for place in places} - step.taking_part - self.unreached:
            step.taking_part.add(engine)
            self.ask_report(step, engine)
        self.placed.add(step.number)
        return failures

    def ask_report(self, step: Step, engine: int) -> None:
        report = TurnReport(step.turn.oldest, EngineCounters(response_tokens=3), problems=["slow"])
        step.reports[self.ref(report, engine)] = engine

    def send(self, step: Step, place: int, engine: int) -> None:
        prompt = step.prompts[place]
        errors = self.failing.get(prompt)
        value = errors.pop(0) if errors else [(prompt, step.turn.oldest)] * SAMPLES
        step.calls[self.ref(value, engine)] = place

    def ref(self, value: Any, engine: int) -> Ref:
        return Ref(ray.exceptions.RayActorError() if engine in self.gone else value)

    def experiences(self, responses: Any) -> list[Any]:
        number = NS(item=lambda: 4)
        made = [
            NS(
                prompt=prompt,
                response_length=number,
                rewards=None,
                scores=[NS(item=lambda score=self.scores[prompt]: score)] if prompt in self.scores else None,
                truncated=number,
                total_length=number,
            )
            for prompt, _ in responses
        ]
        for sample, (_, version) in zip(made, responses, strict=True):
            setattr(sample, ROUNDS, [Round(0, version, 1, tokens=4, last_weight_version=version)])
        return made


def a_pipeline(
    put: Any,
    evaluate: Any = None,
    defer: bool = False,
    filters: bool = False,
    layouts: LayoutPlan | None = None,
    **sizes: int,
) -> tuple[Pipeline, Generator, list[Any]]:
    generator, recorded = Generator(filters, **sizes), []
    services = NS(
        record=lambda event, source: recorded.append(event),
        record_all=lambda events, source: recorded.extend(events),
        record_lengths=lambda step, samples: generator.lengths.append((step, len(samples))),
        settings=NS(limits=NS(stage_s=0.0), histopipe=NS(defer=defer), samples_move=False, outlives_engines=True),
        layouts=layouts,
        losses=generator.losses,
    )
    planner = NS(
        place=lambda step, engines: by_load([None] * len(step.prompts), engines),
        ended=lambda step, place, lengths: None,
        observe=lambda counters, tokens: None,
        trained=lambda seconds: None,
        beta=None,
        last_lengths=dict,
    )
    return Pipeline(generator, services, planner, put, evaluate, list), generator, recorded  # type: ignore[arg-type]


def drawn_steps(sizes: list[int], first: int) -> list[Step]:
    numbers = iter(range(1000))
    found = []
    for step, size in enumerate(sizes, start=first + 1):
        prompts = [f"{next(numbers)}" for _ in range(size)]
        labels = [f"label of {prompt}" for prompt in prompts]
        state = GeneratorState(step)
        found.append(Step(step, 1, prompts, labels, [None] * size, {"episode": 0}, state))
    return found


def by_chance(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Ray gives what has ended in any order, one or several at a time."""
    chance = random.Random(seed)

    def wait(refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        if not timeout:
            # No more than it gave a moment ago.
            return [], list(refs)
        ready = chance.sample(refs, chance.randint(1, min(3, len(refs))))
        return ready, [ref for ref in refs if ref not in ready]

    def get(refs: Any, timeout: float = 0.0) -> Any:
        if not isinstance(refs, Ref):
            return [ref.value for ref in refs]
        if isinstance(refs.value, Exception):
            raise refs.value
        return refs.value

    for module in (pipeline, pipeline_engines):
        monkeypatch.setattr(module, "ray", NS(wait=wait, get=get, exceptions=ray.exceptions))
    monkeypatch.setattr(pipeline, "RolloutWatch", lambda *_, **__: Watch())
