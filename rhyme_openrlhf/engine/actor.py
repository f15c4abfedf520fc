"""Our rollout engine: OpenRLHF's vLLM actor with drafts from history, numbered weights and a record of its time.

The one class that plugs into OpenRLHF's actor. Everything else that an engine does is a part (actor_parts/), which the
run's settings attach (factory.py): measuring, turns of the pipeline, samples that move, answers to checks.

Invariants:
- Every request carries the weight version it was started with as vLLM's `cache_salt`: no KV block made by one version
  is ever found by a request of another. A request that would start while weights load waits for the new ones.
- Weights are loaded only while no sample runs. With partial rollout the engine is paused instead and drops its KV
  cache. Every running sample then recomputes it with the new weights, so its response spans two versions.
- History never delays a sample: its index is installed while the sample already runs, and a history worker that is
  slow, full or dead only means no drafts. Only a reproducible run waits for the index (at most
  --history.fetch_timeout_s), because drafts decide which tokens are sampled at a temperature.

Checked against OpenRLHF 0.11.2 `trainer/ray/vllm_engine.py`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate

from rhyme_openrlhf.garbage import kept_for_good
from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

with kept_for_good():
    import openrlhf.trainer.ray.vllm_engine as upstream
import ray
from vllm import RequestOutput, SamplingParams
from vllm.utils import random_uuid
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine import arguments, calls, requests
from rhyme_openrlhf.engine.actor_parts.histories import Histories, HistoryFeed
from rhyme_openrlhf.engine.actor_parts.part import Engine, OrdersLock, Part
from rhyme_openrlhf.engine.actor_parts.timeline import EngineTimeline
from rhyme_openrlhf.engine.calls import P, R, SchedulerDrafting, SchedulerMeter, WorkerCalls
from rhyme_openrlhf.engine.checked_agent import CheckedAgent
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, check_response
from rhyme_openrlhf.engine.patches import core_channel, single_tokens
from rhyme_openrlhf.engine_errors import EngineCoreError, WeightLoadError
from rhyme_openrlhf.ray_classes import plain_class
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import NGRAM
from rhyme_openrlhf.telemetry.engine_events import RUNNING
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round
from rhyme_openrlhf.weights.buckets import Segment

PlainRolloutActor = plain_class(upstream.RolloutRayActor, __name__, "PlainRolloutActor")

# Requests before a run's first, prompt tokens of each and tokens of each answer: a prefill and a decode step of more
# than one sample. And the prompt that they say they are of, as a run's requests do.
REHEARSAL, REHEARSED = (2, 8, 2), "rehearsal"
# How often vLLM's process is looked at while its answer is awaited.
CORE_CHECK_SECONDS = 1.0


def answering(*protocols: type) -> Callable[[type], type]:
    """Give a Ray actor's class a method for each call of these protocols; the part that answers them is called."""

    def methods(actor: type) -> type:
        for protocol in protocols:
            for name in calls.names(protocol):
                setattr(actor, name, _method(actor, protocol, name))
        return actor

    return methods


def _method(actor: type, protocol: type, name: str) -> Any:
    @functools.wraps(getattr(protocol, name))
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if protocol not in self.parts:
            raise TypeError(f"engine {self.index} does not answer {protocol.__name__}.{name}: its run needs none")
        answer = getattr(self.parts[protocol], name)(*args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    # Ray pickles a method by value unless it is found under its name.
    method.__module__, method.__qualname__ = actor.__module__, f"{actor.__qualname__}.{name}"
    return method


@answering(
    calls.MeasuringCalls, calls.ProofCalls, calls.TurnCalls, calls.SampleCalls, calls.DeviceCalls, calls.AnswerCalls
)
class RhymeRolloutActor(PlainRolloutActor):  # type: ignore[misc, valid-type]
    """One vLLM engine of a run.

    `rhyme` are the run's settings, `run_seed` its --train.seed; `index` is the engine's number; `history_workers` are
    Ray actor handles (may be empty); `parts(engine)` returns what it has beside itself, by the calls that each answers.
    """

    # Ray awaits an actor's constructor; upstream's is one too.
    async def __init__(  # type: ignore[misc]
        self,
        *args: Any,
        rhyme: RhymeSettings,
        run_seed: int,
        index: int,
        history_workers: list[Any],
        parts: Callable[[Engine], dict[type, Part]],
        **kwargs: Any,
    ) -> None:
        self.rhyme = rhyme
        self.index = index
        self.seeds = requests.Seeds(run_seed, rhyme.run.reproducible)
        self.weight_version = 0
        self.tokenizer: Any = None
        self.running: set[str] = set()
        self.orders = OrdersLock()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self.counted = EngineCounters()
        self.traced: frozenset[str] = frozenset()
        self.timeline = EngineTimeline(time.time())
        self.rests = "idle"
        self.parts = parts(self)
        kwargs.update(rhyme.engine.arguments())
        start = partial(self._start, args, kwargs)
        for part in self.parts.values():
            await part.before_start(kwargs, start)
        # Another engine may have been here.
        self.rhyme = rhyme
        # Upstream's constructor names the class as a module global, in this process.
        upstream.SingleTurnAgentExecutor = partial(CheckedExecutor, limit_s=rhyme.limits.reward_s)
        await start(rhyme, self.plugins())
        if kwargs.get("agent_func_path"):
            self.executor: Any = CheckedAgent(self.executor, kwargs["agent_func_path"])
        if rhyme.histospec.enable and rhyme.drafting.source == NGRAM:
            await self.workers(WorkerCalls.rhyme_look_up_serially)
        if not rhyme.weights_by_buffer:
            await self.workers(WorkerCalls.rhyme_check_broadcast)
        workers = history_workers if rhyme.drafts_from_history else []
        self.histories = Histories(HistoryFeed(workers, self.scheduler, rhyme.history.fetch_timeout_s))
        await self._start_the_rest()
        for part in self.parts.values():
            await part.has_started()

    async def _start(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], rhyme: RhymeSettings, ours: dict[str, Any]
    ) -> None:
        self.rhyme = rhyme
        kwargs = kwargs | ours
        if not gpu_present():
            from rhyme_openrlhf.platform.cpu_arguments import cpu_engine_arguments

            kwargs = cpu_engine_arguments(kwargs, rhyme.cpu)
        kwargs["worker_extension_cls"] = arguments.WORKER_EXTENSION
        await super().__init__(*args, **kwargs)
        # Before any part wraps vLLM's frontend too: what it holds back is taken in one by one as well.
        single_tokens.install(self.llm)

    def plugins(self) -> dict[str, Any]:
        """Return vLLM's engine arguments of ours."""
        found = arguments.speculation_arguments(self.rhyme)
        for part in self.parts.values():
            found |= part.arguments()
        return found

    async def _start_the_rest(self) -> None:
        """Start now what an engine starts once: else it is time of the first rollout stage.

        The first requests load plug-ins and start threads here, and kernels in the workers. This process has hundreds
        of thousands of objects once everything is imported. Python's next full garbage collection would visit them all:
        half a second, soon after the first requests, in which no request reaches vLLM. So all of them are left out of
        collections, as in vLLM's own server and its engine core.

        Without drafts these requests draw no random number: samples at a temperature are then OpenRLHF's own.
        """
        async with asyncio.timeout(self.rhyme.limits.stage_s):
            draws = self.rhyme.histospec.enable
            await requests.generate_alike(self.llm, *REHEARSAL, {requests.PROMPT_KEY: REHEARSED}, draws)
        freeze_gc_heap()

    async def scheduler(self, method: Callable[Concatenate[Any, P], R], *arguments: P.args, **_: P.kwargs) -> R:
        """Call a method of this engine's scheduler (calls.py)."""
        answer: R = await self._of_core(core_channel.call_scheduler(self.llm, method.__name__, *arguments))
        return answer

    async def workers(self, method: Callable[Concatenate[Any, P], R], *arguments: P.args, **_: P.kwargs) -> list[R]:
        """Call a method of each rank's worker (calls.py)."""
        answers: list[R] = await self._of_core(self.llm.collective_rpc(method.__name__, args=arguments))
        return answers

    async def _of_core(self, answer: Coroutine[Any, Any, R]) -> R:
        """Return an answer of vLLM's process. Raises EngineCoreError when that is gone: vLLM would wait for ever."""
        answering = asyncio.create_task(answer)
        try:
            while not (await asyncio.wait({answering}, timeout=CORE_CHECK_SECONDS))[0]:
                await self.alive()
            return answering.result()
        except EngineDeadError:
            raise EngineCoreError(self.core_died) from None
        finally:
            answering.cancel()

    def ready(self) -> bool:
        """Answer once the engine has started: what the driver waits for."""
        return True

    # --- samples

    async def generate_responses(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """Return the responses to one prompt, as upstream, with the prompt's history installed beside.

        A prompt of a run comes without a tokenizer: `take_tokenizer` has brought the one of all prompts.
        """
        tokenizer = self.tokenizer if hf_tokenizer is None else hf_tokenizer
        key = requests.history_key(prompt, requests.visit_of(prompt))
        ask = super().generate_responses
        fetch = self.histories.begin(key)
        try:
            await self.until_drafted_alike(fetch)
            responses = await self.seeds.answers(
                prompt,
                num_samples,
                lambda plain: ask(plain, label, sampling_params, max_length, tokenizer, 1, images),
            )
            for response in responses:
                check_response(response)
            await self._add_traces(responses)
            return responses
        finally:
            await self.histories.end(key)

    def take_tokenizer(self, tokenizer: Any) -> None:
        """Keep the tokenizer (of a vision model: the processor) of all prompts that follow.

        Upstream sends it with each prompt; to unpickle a vocabulary of 150,000 entries takes a quarter of a second.
        """
        self.tokenizer = tokenizer

    async def until_drafted_alike(self, fetch: asyncio.Task[None] | None) -> None:
        """Wait for an index in a reproducible run; else samples never wait for one."""
        if self.rhyme.run.reproducible and fetch is not None:
            await asyncio.wait([fetch], timeout=self.rhyme.history.fetch_timeout_s)

    def trace_prompts(self, keys: list[str]) -> None:
        """Note from now on of the samples of these prompts (`prompt_key`), and of no others, what was drafted."""
        self.traced = frozenset(keys)

    async def _add_traces(self, responses: list[dict[str, Any]]) -> None:
        """Add to the responses' rounds what the scheduler noted of them."""
        rounds = [one for response in responses for one in response[ROUNDS] if one.trace]
        if not rounds or not self.rhyme.histospec.enable:
            return
        traces = await self.scheduler(SchedulerDrafting.take_traces, [one.trace for one in rounds])
        for one, trace in zip(rounds, traces, strict=True):
            one.drafted, one.spans = trace["drafted"], trace["spans"]

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> RequestOutput:
        """Return vLLM's output of one request. Same contract as upstream's method, which it replaces.

        Only the final output is built, and only what upstream's executor reads of it.
        """
        try:
            return await self._generate(prompt_token_ids, sampling_params, multi_modal_data)
        finally:
            for part in self.parts.values():
                part.answered()

    async def _generate(self, tokens: list[int], sampling_params: SamplingParams, multi_modal: Any) -> RequestOutput:
        await self.until_open()
        prompt = requests.prompt_of(tokens, self.weight_version, multi_modal, self.media_padding())
        length = len(prompt["prompt_token_ids"])
        parameters = requests.final_only(sampling_params)
        if type(self.executor) is CheckedExecutor:
            requests.leave_out_unread(parameters)
        self.seeds.seed(parameters, length)
        request_id = random_uuid()
        identity = requests.current_sample.get()
        noted = None
        if identity is not None:
            key = requests.history_key(identity.prompt, identity.visit)
            of_round, fetch = self.histories.round(key, len(identity.rounds))
            noted = Round(self.index, self.weight_version, length)
            identity.rounds.append(noted)
            parameters.extra_args = {**(parameters.extra_args or {}), requests.PROMPT_KEY: of_round}
            if key in self.traced:
                noted.trace = parameters.extra_args[requests.TRACE] = request_id
            await self.until_drafted_alike(fetch)
        self.started(request_id)
        try:
            output = await requests.generate(self.llm, prompt, parameters, request_id)
        except EngineDeadError:
            raise EngineCoreError(self.core_died) from None
        finally:
            self.ended(request_id)
        if noted is not None:
            noted.end(self.weight_version, output.outputs[0])
        return output

    def media_padding(self) -> Any:
        """Return the tokens that stand for media in prompts, as upstream knows them."""
        return self._mm_pad_token_ids

    def started(self, request_id: str) -> None:
        """Note that a sample's request goes to vLLM."""
        if not self.running:
            self.timeline.enter("generate", time.time(), self.weight_version)
        self.running.add(request_id)
        for part in self.parts.values():
            part.sample_started(request_id)

    def ended(self, request_id: str) -> None:
        """Note that a sample's request is over."""
        for part in self.parts.values():
            part.sample_ended(request_id)
        self.running.discard(request_id)
        if not self.running:
            self.timeline.enter(self.rests, time.time(), self.weight_version)

    async def score(self, token_ids: list[int]) -> list[float]:
        """Return the log-probability of each token after the first, by the weights of now, at temperature 1."""
        output = await PlainRolloutActor.generate(self, list(token_ids), requests.scored())
        return [at[token].logprob for at, token in list(zip(output.prompt_logprobs, token_ids, strict=True))[1:]]

    # --- weights

    @property
    def is_open(self) -> bool:
        """Return whether samples may start: False while weights load."""
        return self._may_start.is_set()

    async def until_open(self) -> None:
        """Wait until samples may start."""
        await self._may_start.wait()

    def _open(self) -> None:
        self._may_start.set()
        for part in self.parts.values():
            part.opened()

    async def load_weights(self, segment: Segment) -> float:
        """Load a weight version; return the seconds it took.

        Raises WeightLoadError when samples run (and the engine is not paused for partial rollout), or when a worker
        reports another version than asked for.
        """
        async with self.orders.all():
            if self.running and self.is_open:
                raise WeightLoadError(
                    f"engine {self.index} was told to load weight version {segment.version} while "
                    f"{len(self.running)} samples run with version {self.weight_version}"
                )
            started = time.monotonic()
            self.timeline.enter("sync", time.time(), self.weight_version)
            was_open = self.is_open
            self._may_start.clear()
            try:
                versions = await self.workers(WorkerCalls.rhyme_load_weights, segment.to_plain())
                if set(versions) != {segment.version}:
                    raise WeightLoadError(f"engine {self.index} loaded {versions} instead of version {segment.version}")
                await self._of_core(self.llm.reset_prefix_cache())
                self.weight_version = segment.version
            finally:
                if was_open:
                    self._open()
                self.timeline.enter("generate" if self.running else self.rests, time.time(), self.weight_version)
            return time.monotonic() - started

    async def pause_generation(self) -> None:
        """Freeze running samples and drop their KV cache; new ones wait (partial rollout, before a weight load)."""
        async with self.orders.all():
            self._may_start.clear()
            await super().pause_generation()

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`; frozen samples recompute their KV cache with the weights now loaded."""
        await super().resume_generation()
        self._open()

    def set_weight_version(self, version: int) -> None:
        """Note the version that OpenRLHF's own broadcast just brought (`--weights.transport openrlhf`)."""
        self.weight_version = version

    # --- what the run record asks

    async def begin_rollout(self) -> None:
        """Begin a rollout stage: what was done since the last one (an evaluation, a weight check) is none of it."""
        self.counted = await self.totals()
        if self.rhyme.histospec.enable:
            await self.scheduler(SchedulerDrafting.take_decisions)
        for part in self.parts.values():
            part.rollout_begun()

    async def progress(self) -> dict[str, Any]:
        """Return counters since `begin_rollout`; RUNNING: the samples that run now; KV_CACHE: its share in use.

        SLOWEST: prompt key and response tokens of the longest of them, or None.
        """
        answer = await self.scheduler(SchedulerMeter.read_counters)
        done = (EngineCounters.from_dict(answer) - self.counted).to_dict()
        return {**answer, **done, RUNNING: len(self.running)}

    async def totals(self) -> EngineCounters:
        """Return everything the engine did since it started."""
        return EngineCounters.from_dict(await self.scheduler(SchedulerMeter.read_counters))

    async def rollout_report(self, rollout_start: float, rollout_end: float) -> dict[str, Any]:
        """Return what this engine did in a rollout stage.

        Since `begin_rollout`: counters and draft decisions (fields of a DraftBudget event). Since the last report:
        timeline and problems (sentences). Also the gain of drafts (fields of a DraftGain event). Times are unix seconds
        of the rollout stage; idle time within it gets its cause.
        """
        counted = (await self.totals() - self.counted).to_dict()
        intervals = self.timeline.take(rollout_start, rollout_end)
        problems = self.histories.feed.take_problems()
        decisions, gain, sentences = await self.planning()
        return {
            "counters": counted,
            "intervals": intervals,
            "weight_version": self.weight_version,
            "problems": [*problems, *sentences],
            "decisions": decisions,
            "gain": gain,
        }

    async def planning(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Return what the scheduler tells of its planning: decisions, gain, sentences; empty without speculation."""
        if not self.rhyme.histospec.enable:
            return {}, {}, []
        return await asyncio.gather(
            self.scheduler(SchedulerDrafting.take_decisions),
            self.scheduler(SchedulerDrafting.read_gain),
            self.scheduler(SchedulerDrafting.take_sentences),
        )

    async def alive(self) -> None:
        """Answer while this engine can generate. Raises EngineCoreError when its vLLM process is gone."""
        try:
            await self.llm.check_health()
        except EngineDeadError:
            raise EngineCoreError(self.core_died) from None

    @property
    def core_died(self) -> str:
        """Return the sentence for an engine whose vLLM process is gone."""
        return f"the vLLM engine core of engine {self.index} (a child of process {os.getpid()}) died or failed"

    def node_id(self) -> str:
        """Return the Ray node this engine runs on."""
        return ray.get_runtime_context().get_node_id()

    async def node_ids(self) -> list[str]:
        """Return the Ray nodes of this engine: the actor's, then those of its tensor-parallel ranks."""
        ranks = await self.workers(WorkerCalls.rhyme_node)
        own = self.node_id()
        return list(dict.fromkeys([own, *(node or own for node in ranks)]))
