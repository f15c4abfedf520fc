"""The samples generator of the streaming pipeline: draws steps ahead, and hands each engine its part as a turn.

Upstream's methods decide how prompts are drawn, with which sampling parameters they are sent and what becomes of a
response. Checked against OpenRLHF 0.11.2 `trainer/ppo_utils/samples_generator.py`.

Invariants: prompts are drawn in upstream's order, a step's never beyond an epoch. With each step travels the data
loader's and the generator's state right after its prompts were drawn. So a checkpoint of that step goes on with the
next prompt, although more were drawn or generated since.
"""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from rhyme_openrlhf.engine.port import prompt_engines_left
from rhyme_openrlhf.engine_errors import EngineCallError, EngineCoreError, EngineLost
from rhyme_openrlhf.history.workers import announce
from rhyme_openrlhf.pipeline.step import PromptStream, Step
from rhyme_openrlhf.scheduling.turns import Turn, evaluation_turn
from rhyme_openrlhf.telemetry.samples import chosen_prompts
from rhyme_openrlhf.telemetry.services import leave_out
from rhyme_openrlhf.training.samples_generator import (
    REPORT_TIMEOUT_SECONDS,
    GeneratorState,
    RhymeSamplesGenerator,
    Row,
    stand_in,
)

# What a call raises to an engine that is gone or cannot be reached, or to its samples' home.
LOST = (ray.exceptions.RayActorError, EngineCoreError, EngineLost)
# Why a sample that is too long for its rank group moves within the step (an event's cause).
MOVED_WITHIN = "outlier_intra"


ScoreRange = tuple[float, float]


def score_range(args: SimpleNamespace) -> ScoreRange | None:
    """Return what a prompt group's mean score must lie within; None where nothing is filtered."""
    if not args.algo.dynamic_filtering_enable:
        return None
    low, high = args.algo.dynamic_filtering_range
    return float(low), float(high)


def teaches_nothing(samples: Sequence[Any], within: ScoreRange | None) -> bool:
    """Return whether the prompt group of these samples (OpenRLHF's experiences) is to be filtered out.

    The rule is upstream's (`_generate_vllm`): a prompt group's mean score must lie within the range, both ends
    excluded; where a sample has no score nothing is filtered.
    """
    if within is None or any(sample.scores is None for sample in samples):
        return False
    low, high = within
    return not low < statistics.fmean(sample.scores[0].item() for sample in samples) < high


def turn_door(engine: Any, number: int, places: Iterable[int] = (), begin: Any = None) -> Any:
    """Return as much of an engine's handle as OpenRLHF's dispatch uses; what is sent to it waits for turn `number`.

    `places`: of the prompts that will be sent, in that order; -1 where none is given. `begin`: what a call is sent to
    instead of the engine's own method.
    """
    following = iter(places)

    def generate_responses(**arguments: Any) -> Any:
        return (begin or engine.generate_in_turn.remote)(number, next(following, -1), **arguments)

    return stand_in(engine, generate_responses)


class PipelineSamplesGenerator(RhymeSamplesGenerator):
    """`step` is the last training step that prompts were drawn for; `generate_kwargs`: upstream's, for every sample."""

    generate_kwargs: dict[str, Any] = {}

    # Of a resumed run's first step.
    _deferred: tuple[Row, ...] = ()
    _used: tuple[int, ...] = ()

    def restore(self, state: GeneratorState) -> None:
        """Go on from `state`, as the base class does.

        The next step begins with the prompts that were deferred to it; those that were used out of turn are left out.
        """
        super().restore(state)
        self._deferred, self._used = state.deferred, state.used

    def draw(self, episode: int, consumed: int) -> Iterator[Step]:
        """Draw the steps of the rest of the run, from `episode` (from 0) on; `consumed` prompts were drawn before."""
        for number in range(episode, self.args.train.num_episodes):
            # A resumed run may have prompts to generate first.
            begun: Iterator[Any] | None = self.__dict__.pop("_dataloader_iter", None)
            stream = PromptStream(iter(self.prompts_dataloader) if begun is None else begun, self._used)
            self._used = ()
            while not stream.exhausted:
                taken = stream.take(self.args.rollout.batch_size - len(self._deferred))
                taken.add(self._deferred)
                self._deferred = ()
                if not taken.prompts:
                    break
                self.step += 1
                consumed += len(taken.prompts)
                states = {
                    "episode": number,
                    "total_consumed_prompts": consumed,
                    # It may hold what the loader goes on changing.
                    "data_loader_state_dict": copy.deepcopy(self.prompts_dataloader.state_dict()),
                }
                yield Step(
                    self.step,
                    number + 1,
                    client_states=states,
                    generator=self.state(),
                    stream=stream,
                    drawn=stream.place,
                    **vars(taken),
                )

    def begin(self, step: Step, turn: Turn, lengths: Mapping[str, Sequence[int]] | None = None) -> None:
        """Begin to generate a step in this turn.

        `lengths`: how long prompts (`prompt_key`) were answered before, where that was asked.
        """
        step.turn = turn
        if self._home is not None:
            self._acknowledged(self._home.open.remote())
            self._home.begin_step.remote(step.number, 0, lengths)

    def place(self, step: Step, places: Sequence[int]) -> dict[int, Exception]:
        """Have whole prompt groups of a step, which no engine has, generated by the engines of `step.engine_of`.

        Return why engines could not be reached. They have not been given theirs, or are given the same again: an engine
        takes each attempt at a prompt group once. An engine without prompts has no turn of the step.
        """
        by_engine: dict[int, list[int]] = defaultdict(list)
        for place in places:
            by_engine[step.engine_of[place]].append(place)
        if self.services.settings.histospec.enable:
            announce([step.prompts[place] for place in places], self.services.history_workers, step.number)
        samples, traced = self.args.rollout.n_samples_per_prompt, self._traced(step)
        # Waited for: calls with large arguments can be overtaken by others.
        answers = {
            engine: self.vllm_engines[engine].extend_turn.remote(
                step.turn, [(place, step.attempts[place]) for place in of], samples, traced
            )
            for engine, of in by_engine.items()
        }
        failures: dict[int, Exception] = {}
        for engine, of in sorted(by_engine.items()):
            try:
                number = self._acknowledged(answers[engine])
                self._send(step, engine, of, number)
            except LOST as error:
                failures[engine] = error
                continue
            step.attempts.update(of)
            if number == step.turn.number and engine not in step.taking_part:
                step.taking_part.add(engine)
                self.ask_report(step, engine)
        return failures

    def ask_report(self, step: Step, engine: int) -> None:
        """Ask an engine for its report of a step's turn."""
        step.reports[self.vllm_engines[engine].turn_report.remote(step.turn.number)] = engine

    def _traced(self, step: Step) -> list[str]:
        groups = self.services.settings.telemetry.sample_groups
        return chosen_prompts(step.prompts, step.number, groups) if groups else []

    def _send(self, step: Step, engine: int, places: Sequence[int], turn: int) -> None:
        begin = None if self._home is None else partial(self._home.generate_in_turn.remote, engine)
        with self.sending_to([turn_door(self.vllm_engines[engine], turn, places, begin)]):
            calls = SamplesGenerator._dispatch_prompts_to_vllm(
                self,
                [step.prompts[place] for place in places],
                [step.labels[place] for place in places],
                images=[step.images[place] for place in places],
                **self.generate_kwargs,
            )
        step.calls.update(zip(calls, places, strict=True))

    def move(self, sample: int, engine: int) -> None:
        """Have a running sample go on at another engine, if it still runs; not waited for."""
        self._home.move.remote(sample, engine, MOVED_WITHIN)

    def experiences(self, responses: Sequence[dict[str, Any]]) -> list[Any]:
        """Return one prompt's responses as upstream's experiences."""
        return [self._process_response_into_experience(response, **self.generate_kwargs) for response in responses]

    @contextmanager
    def evaluation(self, version: int) -> Iterator[None]:
        """Within the block, prompts that are sent wait for the turn of the evaluation of weight version `version`."""
        turn = evaluation_turn(version)
        leave_out(self.vllm_engines, self.services)
        left = prompt_engines_left(self.vllm_engines, self.services.layouts)
        engines = [self.vllm_engines[number] for number in left]
        self._acknowledged([engine.hand_turn.remote(turn, None, []) for engine in engines])
        try:
            with self.sending_to([turn_door(engine, turn.number) for engine in engines]):
                yield
        finally:
            for engine in engines:
                engine.close_turn.remote(turn.number)

    @staticmethod
    def _acknowledged(calls: Any) -> Any:
        try:
            return ray.get(calls, timeout=REPORT_TIMEOUT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            waited = f"waited {REPORT_TIMEOUT_SECONDS:g} s"
            raise EngineCallError(f"{waited} for an engine to take its part of a step, which takes no time") from None

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kwargs: Any) -> list[Any]:
        # Only evaluations come this way; a step's prompts go through `place`.
        return SamplesGenerator._dispatch_prompts_to_vllm(self, prompts, labels, **kwargs)
