"""OpenRLHF's samples generator, which also records each rollout stage, and can go on where a killed one stopped.

Upstream decides which prompts are drawn, and without history to which engine each goes. With history, prompts go to
engines by predicted work. Upstream's dispatch chooses by counts and calls the engine it chose, prompt after prompt.
`routed` stands for its engines: the n-th prompt goes to the engine chosen for it, by any of these stand-ins. Checked
against OpenRLHF 0.11.2 `trainer/ppo_utils/samples_generator.py`.

Invariants:
- Recording never changes a sample.
- History decides only the engine, never what is generated or in which order prompts are sent.
- No prompt takes a tokenizer along: actors that answer prompts get it once (`prepare`).
- Asking for lengths has a limit, and no answer is no history.
- With `state` and the data loader's state, a new generator draws exactly the prompts that were not trained on yet.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_openrlhf.engine.calls import EngineHandle
from rhyme_openrlhf.engine.checked_reward import RewardError, shown
from rhyme_openrlhf.engine.messages import unpacked
from rhyme_openrlhf.engine.port import prompt_engines_left
from rhyme_openrlhf.engine.requests import VisitedPrompt
from rhyme_openrlhf.engine_losses import engines_left
from rhyme_openrlhf.history.workers import announce, known_earlier, last_lengths
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.scheduling.step_plan import by_predicted_work
from rhyme_openrlhf.settings.history import AUTO, NONE
from rhyme_openrlhf.telemetry.engine_events import engine_events, interval_events
from rhyme_openrlhf.telemetry.events import Note, RolloutStarted
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import ROUNDS, chosen_prompts
from rhyme_openrlhf.telemetry.services import RunServices, leave_out
from rhyme_openrlhf.training.engines import ask_engines
from rhyme_openrlhf.training.experience import by_worker
from rhyme_openrlhf.training.reproducible import in_prompt_order, random_state, set_random_state
from rhyme_openrlhf.training.rollout_watch import SOURCE, EvaluationWatch, RolloutWatch, rollout_finished

# A report asks an engine's scheduler for its counters, which it answers between two steps.
REPORT_TIMEOUT_SECONDS = 120.0
# History workers answer within milliseconds; a rollout does not wait longer to be spread a little better.
LENGTHS_TIMEOUT_SECONDS = 2.0
# In a data loader's state (torchdata 0.11): whether its epoch's prompts are all drawn.
LOADER_FINISHED = "_iterator_finished"


# More training steps than a run has.
MOST_STEPS = 1 << 32
# A row of the data set as upstream hands it on: prompt, label, images. Rows may have the same prompt.
Row = tuple[str, Any, Any]


@dataclass(frozen=True)
class GeneratorState:
    """The state of a generator after it gave out the samples of training step `step`; only plain objects.

    `visits`: how often each prompt was sent to an engine (counted in reproducible runs, whose seeds need it).
    `random`: the random state of its process; None: it starts fresh. `pending`: rows whose samples upstream had
    generated ahead but not given out; they are generated again, because the samples themselves may be gigabytes.
    `deferred`: rows of this step that the next one trains on. `used`: the prompts that this step or an earlier one used
    out of turn, each as its distance behind the data loader's state. They took the places of ones that were deferred,
    filtered out or had no reward.
    """

    step: int
    visits: dict[str, int] = field(default_factory=dict)
    random: dict[str, Any] | None = None
    pending: tuple[Row, ...] = ()
    deferred: tuple[Row, ...] = ()
    used: tuple[int, ...] = ()


class RhymeSamplesGenerator(SamplesGenerator):
    """Upstream's generator; `step` is the last training step it generated for."""

    vllm_engines: list[EngineHandle]
    tokenizer: Any

    def __init__(self, *args: Any, services: RunServices, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Upstream sends this attribute with every prompt, and reads it for nothing else.
        self._given_tokenizer, self.tokenizer = self.tokenizer, None
        self.services = services
        self.step = 0
        self.seconds = 0.0
        self._stage: RolloutWatch | None = None
        self._evaluating = False
        self._visits: Counter[str] = Counter()
        self._evaluated: Counter[str] = Counter()
        self._home: Any = None

    @property
    def metrics(self) -> dict[str, float]:
        """No metrics: upstream's trainer adds to a step's metrics what this generator found."""
        return {}

    def state_after(self, client_states: dict[str, Any]) -> GeneratorState:
        """Return where this generator stands after the samples that it gave out last."""
        return self.state()

    def state(self) -> GeneratorState:
        """Return where this generator stands; goes with the data loader's state of the same moment."""
        # Upstream's buffer has the samples of each row side by side, and whole. A prompt would not do as a row's name.
        first_of_each = getattr(self, "_sample_buffer", [])[:: self.args.rollout.n_samples_per_prompt]
        pending = tuple((sample.prompts[0], sample.labels[0], sample.images[0]) for sample in first_of_each)
        return GeneratorState(self.step, dict(self._visits), random_state(), pending)

    def restore(self, state: GeneratorState) -> None:
        """Go on from `state`; before the next samples, the data loader's state is loaded into the data loader."""
        self.step = state.step
        self._visits = Counter(state.visits)
        if state.random is not None:
            set_random_state(state.random)
        if state.pending:
            self._dataloader_iter = self._pending_first(state.pending)
            self._sample_buffer: list[Any] = []

    def _pending_first(self, pending: tuple[Row, ...]) -> Iterator[tuple[Any, ...]]:
        """Yield the rest of an epoch's prompts as upstream's loader gives them, `pending` before all."""
        for prompt, label, images in pending:
            yield None, [prompt], [label], [images]
        if not self.prompts_dataloader.state_dict()[LOADER_FINISHED]:
            yield from self.prompts_dataloader

    def generate_eval_samples(self, **generate_kwargs: Any) -> list[Any]:
        """Samples of the evaluation prompts, as upstream; they are no rollout stage."""
        self._evaluating = True
        self._evaluated.clear()
        watch = EvaluationWatch(self.vllm_engines, self.services)
        watch.begin(self.step, 0)
        watch.start()
        try:
            samples: list[Any] = super().generate_eval_samples(**generate_kwargs)
        finally:
            watch.stop()
            self._evaluating = False
        self._keep_evaluation(samples)
        return samples

    def _keep_evaluation(self, samples: list[Any]) -> None:
        """Send an evaluation's responses to the history workers, for the next one.

        A reproducible run keeps none: its evaluations must not depend on whether one came before its last checkpoint.
        """
        settings, workers = self.services.settings, self.services.history_workers
        if workers and settings.histospec.enable and not settings.run.reproducible:
            shares = by_worker(samples, len(workers), settings.histospec.prefix_max, evaluation=True)
            for number, rollouts in shares.items():
                workers[number].record.remote(self.step, rollouts, evaluation=True)

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Any], float | None, int, bool]:
        """Return the samples of one training step, as upstream, with the stage's events.

        Upstream also calls this once more when the epoch's prompts are used up; then nothing is dispatched.
        """
        result = super().generate_samples(**generate_kwargs)
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.stop()
            self.seconds = stage.seconds
        if result[0]:
            self.step += 1
            if stage is not None:
                self._record_stage(stage, result[0])
        return result

    def _generate_vllm(self, *args: Any, **kwargs: Any) -> tuple[list[Any], int, bool]:
        """Return upstream's samples; in a reproducible run by prompt, not in the order in which they ended.

        Upstream cuts them into steps afterwards, so the order decides which samples a step trains.
        """
        samples, *more = super()._generate_vllm(*args, **kwargs)
        if self.services.settings.run.reproducible:
            of_each = kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
            samples = in_prompt_order(samples, of_each)
        return samples, *more

    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list[str], **kwargs: Any) -> list[Any]:
        leave_out(self.vllm_engines, self.services)
        if self._stage is None and not self._evaluating:
            step = self.step + 1
            samples = len(prompts) * self.args.rollout.n_samples_per_prompt
            self.services.record(RolloutStarted(step, self.services.epoch_of(step), len(prompts), samples), SOURCE)
            for engine in self.vllm_engines:
                # Not waited for: an engine takes this in before the prompts, which are sent after it.
                engine.begin_rollout.remote()
            self._stage = RolloutWatch(self.vllm_engines, self.services)
            self._stage.begin(step, samples)
            self._stage.start()
            # Not for the single prompts that dynamic filtering sends later: those chosen before still run.
            self._choose_samples(prompts)
        # An evaluation is that of the step before it.
        step = self.step if self._evaluating else self.step + 1
        announce(prompts, self.services.history_workers, step, evaluation=self._evaluating)
        lengths = self._last_lengths(prompts)
        with self._samples_at_home(prompts, lengths, **kwargs), self._by_predicted_work(lengths, **kwargs):
            return super()._dispatch_prompts_to_vllm([self._visited(prompt) for prompt in prompts], labels, **kwargs)

    def start_home(self) -> None:
        """Have a home for samples, if they may move; it starts while the engines do."""
        if not self.services.settings.samples_move:
            return
        from rhyme_openrlhf.moves.home import HomeActor

        args = self.args
        # Ray would put an actor without CPUs on any node, which may be lost with it.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._home = HomeActor.options(scheduling_strategy=here).remote(
            self.vllm_engines, self.services.settings, args.train.seed, args.train.agent_func_path,
            args.reward.remote_url, [self._shared_tokenizer], self.services.recorder, self.services.layouts,
        )  # fmt: skip

    @functools.cached_property
    def _shared_tokenizer(self) -> Any:
        """Ray's reference to the tokenizer, or to a vision model's processor."""
        return ray.put(self._given_tokenizer)

    def prepare(self) -> None:
        """Give the engines, which have started, the tokenizer of all prompts, and start the home's fronts with it.

        Raises what ended one of them, or RuntimeError when one takes too long.
        """
        limit = self.services.settings.limits.stage_s
        awaited = [engine.take_tokenizer.remote(self._shared_tokenizer) for engine in self.vllm_engines]
        if self._home is not None:
            awaited.append(self._home.start_fronts.remote())
        try:
            ray.get(awaited, timeout=limit)
        except ray.exceptions.GetTimeoutError:
            raise RuntimeError(
                f"waited {limit:g} s (--limits.stage_s) for engines to take the tokenizer and for fronts to start"
            ) from None

    def tell_known(self) -> None:
        """Record how many of the training prompts earlier runs have responses to."""
        settings, workers = self.services.settings.history, self.services.history_workers
        if not workers or settings.earlier == NONE:
            return
        prompts = dict.fromkeys(self.prompts_dataloader.dataset.prompts)
        for sentence in known_earlier([prompt_key(prompt) for prompt in prompts], workers, settings.earlier != AUTO):
            self.services.record(Note("info", sentence), SOURCE)

    @contextlib.contextmanager
    def _samples_at_home(
        self, prompts: list[str], lengths: Sequence[Sequence[int]], **generate_kwargs: Any
    ) -> Iterator[None]:
        """Within it, upstream sends prompts to the home of samples, if there is one, instead of to the engines.

        `lengths`: of the prompts' last responses, none where that was not asked.
        """
        if self._home is None:
            yield
            return
        from rhyme_openrlhf.moves.home import door

        ray.get(self._home.open.remote(), timeout=REPORT_TIMEOUT_SECONDS)
        known = {prompt_key(prompt): list(of_prompt) for prompt, of_prompt in zip(prompts, lengths, strict=False)}
        samples = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        self._home.begin_step.remote(self.step + 1, len(prompts) * samples, known or None)
        engines = self.vllm_engines
        first = self._first_engines(lengths, samples) if len(lengths) == len(prompts) else None
        if first is not None:
            handles = routed([door(self._home, number) for number in range(len(engines))], first)
        else:
            # Tail engines get samples from the others only, while there are others.
            there = prompt_engines_left(engines, self.services.layouts) or engines_left(engines)
            handles = [door(self._home, number) for number in there]
        with self.sending_to(handles):
            yield

    @contextlib.contextmanager
    def sending_to(self, engines: list[Any]) -> Iterator[None]:
        """Within it, upstream sends prompts to these handles of engines."""
        before, self.vllm_engines = self.vllm_engines, engines
        try:
            yield
        finally:
            self.vllm_engines = before

    def _first_engines(self, lengths: Sequence[Sequence[int]], samples: int) -> list[int] | None:
        """Return the engine of each prompt if some nodes begin with larger engines, which the home decides."""
        settings = self.services.settings
        if not (settings.tp_switch.enable and settings.dispatch.by_history and all(lengths)):
            return None
        known = [list(of_prompt) for of_prompt in lengths]
        found: list[int] | None = ray.get(
            self._home.first_engines.remote(known, samples), timeout=REPORT_TIMEOUT_SECONDS
        )
        return found

    def _last_lengths(self, prompts: list[str]) -> list[Sequence[int]]:
        """Return how long the prompts were answered last, where that is known; empty where nothing depends on it."""
        workers, settings = self.services.history_workers, self.services.settings
        if not workers:
            return []
        spread = len(self.vllm_engines) > 1 and settings.dispatch.by_history
        if not spread and not settings.tp_switch.enable:
            return []
        return list(last_lengths(workers, [prompt_key(prompt) for prompt in prompts], LENGTHS_TIMEOUT_SECONDS))

    @contextlib.contextmanager
    def _by_predicted_work(self, lengths: Sequence[Sequence[int]], **generate_kwargs: Any) -> Iterator[None]:
        """Within it, upstream's prompts go where there is least predicted work, if there is any history."""
        engines = self.vllm_engines
        if len(engines) < 2 or not lengths or not self.services.settings.dispatch.by_history:
            yield
            return
        unfinished = ray.get(
            [engine.get_num_unfinished_requests.remote() for engine in engines], timeout=REPORT_TIMEOUT_SECONDS
        )
        samples = generate_kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        chosen = by_predicted_work(lengths, unfinished, samples)
        with self.sending_to(engines if chosen is None else routed(engines, chosen)):
            yield

    def _choose_samples(self, prompts: list[str]) -> None:
        """Tell the engines whose drafts to note, before the prompts reach them."""
        groups = self.services.settings.telemetry.sample_groups
        if groups == 0:
            return
        # With samples generated ahead, one dispatch has prompts for several steps.
        steps = -(-len(prompts) // self.args.rollout.batch_size)
        keys = chosen_prompts(prompts, self.step + 1, groups * steps)
        for engine in (*self.vllm_engines, *([self._home] if self._home is not None else [])):
            engine.trace_prompts.remote(keys)

    def _process_response_into_experience(self, response: dict[str, Any], **generate_kwargs: Any) -> Any:
        """Return upstream's experience, with what was noted of the sample's requests."""
        response = unpacked(response)
        if self.args.algo.dynamic_filtering_enable and isinstance(response.get("scores"), list):
            raise RewardError(
                f"{len(response['scores'])} scores came for {shown(response['prompt'])}, but "
                "--algo.dynamic_filtering_enable needs one for each sample"
            )
        # Upstream reads this key of any executor's response.
        response.setdefault("rollout_log_probs", None)
        experience = super()._process_response_into_experience(response, **generate_kwargs)
        setattr(experience, ROUNDS, response.get(ROUNDS, []))
        return experience

    def _visited(self, prompt: str) -> str:
        """Return the prompt with its visit, where seeds need it or its history depends on it."""
        if self._evaluating:
            # Counted in this evaluation alone, for rows with the same prompt: an evaluation must not change the seeds
            # of training, nor depend on how often one was made.
            self._evaluated[prompt] += 1
            return VisitedPrompt(prompt, -1 - self.step - (self._evaluated[prompt] - 1) * MOST_STEPS)
        if not self.services.settings.run.reproducible:
            return prompt
        self._visits[prompt] += 1
        return VisitedPrompt(prompt, self._visits[prompt] - 1)

    def _record_stage(self, stage: RolloutWatch, samples: list[Any]) -> None:
        step, epoch = self.step, self.services.epoch_of(self.step)
        started, ended = stage.started, stage.ended
        reports = ask_engines(
            self.vllm_engines,
            self.services,
            lambda engine: engine.rollout_report.remote(started, ended),
            REPORT_TIMEOUT_SECONDS,
        )
        for engine, report in enumerate(reports):
            if report is None:
                # Lost: what it did in this stage went with it.
                continue
            counters, version = EngineCounters.from_dict(report["counters"]), report["weight_version"]
            intervals = interval_events(step, engine, report["intervals"])
            told = engine_events(
                step, engine, counters, version, report["decisions"], report["gain"], report["problems"]
            )
            self.services.record_all([*told, *intervals], SOURCE)
        self.services.record_lengths(step, samples)
        self.services.record(rollout_finished(step, epoch, stage.seconds, samples), SOURCE)


def routed(engines: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    """Return stand-ins for `engines`: the n-th prompt that is sent to any of them goes to engine `chosen[n]`."""
    order = iter(chosen)

    def send(**arguments: Any) -> Any:
        return engines[next(order)].generate_responses.remote(**arguments)

    return [stand_in(engine, send) for engine in engines]


def stand_in(engine: Any, send: Callable[..., Any]) -> Any:
    """Return as much of an engine's handle as OpenRLHF's dispatch uses; what it is sent goes to `send`."""
    return SimpleNamespace(
        generate_responses=SimpleNamespace(remote=send),
        get_num_unfinished_requests=engine.get_num_unfinished_requests,
    )
