"""Our rollout engine: OpenRLHF's vLLM actor with drafts from history, numbered weights and a record of its time.

Invariants:
- Every request carries the weight version it was started with as vLLM's `cache_salt`: no KV block made by one
  version is ever found by a request of another. A request that would start while weights load waits for the new ones.
- Weights are loaded only while no sample runs; with partial rollout the engine is paused instead, its KV cache
  dropped, and every running sample recomputes it with the new weights (its response then spans two versions).
- History never delays a sample: its index is installed while the sample already runs, and a history worker that is
  slow, full or dead only means no drafts. Only a reproducible run waits for the index (at most
  --history.fetch_timeout_s), because which tokens are sampled at a temperature depends on where drafts were there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from functools import partial
from typing import Any

from rhyme_openrlhf.engine.seeded_actor import SeededRolloutActor  # first: installs the shims where needed
from rhyme_openrlhf.prompt_keys import prompt_key
from rhyme_openrlhf.settings.config import RhymeSettings

import ray  # isort: skip
import openrlhf.trainer.ray.vllm_engine as upstream  # isort: skip
from openrlhf.utils.vlm_utils import dedup_media_tokens  # isort: skip
from vllm import RequestOutput, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.utils import random_uuid
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.engine.exceptions import EngineDeadError

from rhyme_openrlhf.engine.actor_parts import unspeculated_steps
from rhyme_openrlhf.engine.actor_parts.draft_arguments import vllm_source_arguments
from rhyme_openrlhf.engine.actor_parts.histories_in_flight import HistoriesInFlight
from rhyme_openrlhf.engine.actor_parts.history_feed import HistoryFeed
from rhyme_openrlhf.engine.actor_parts.measuring import StepMeasuring
from rhyme_openrlhf.engine.actor_parts.timeline import EngineTimeline
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, check_finite
from rhyme_openrlhf.engine.patches import core_channel
from rhyme_openrlhf.engine.request_keys import (
    DRAFTING_KEY,
    PACE_KEY,
    PROMPT_KEY,
    PROPOSER,
    SCHEDULER,
    SETTINGS_KEY,
    TRACE,
)
from rhyme_openrlhf.engine.seeding import current_sample
from rhyme_openrlhf.platform import gpu_present
from rhyme_openrlhf.settings.drafting import HISTORY, NGRAM
from rhyme_openrlhf.telemetry.engine_events import KV_CACHE, RUNNING
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round
from rhyme_openrlhf.weights.buckets import Segment


class EngineCoreError(RuntimeError):
    """The vLLM process behind an engine is gone."""


class WeightLoadError(RuntimeError):
    """An engine was told to load weights at a moment when it must not, or could not load them."""


def speculation_arguments(rhyme: RhymeSettings) -> dict[str, Any]:
    """vLLM engine arguments that plug our scheduler in, with or without speculation."""
    own: dict[str, Any] = {PACE_KEY: rhyme.emulate.profile}
    if not rhyme.histospec.enable:
        return {"scheduler_cls": SCHEDULER, "additional_config": own}
    histospec, drafting = rhyme.histospec, rhyme.drafting
    if rhyme.run.reproducible:
        # How far a sibling is depends on timing, and drafts decide which random numbers a sample draws.
        histospec = dataclasses.replace(histospec, siblings=False)
        drafting = dataclasses.replace(drafting, probe_share=0)
    own |= {SETTINGS_KEY: dataclasses.asdict(histospec), DRAFTING_KEY: dataclasses.asdict(drafting)}
    if drafting.source != HISTORY:
        return vllm_source_arguments(histospec, drafting) | {"additional_config": own} | graph_arguments()
    return {
        "scheduler_cls": SCHEDULER,
        "additional_config": own,
        **graph_arguments(),
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": rhyme.histospec.window_max,
        },
    }


def graph_arguments() -> dict[str, Any]:
    """Return vLLM's arguments for the CUDA graphs of an engine that drafts; none without a GPU.

    FULL graphs serve only steps in which every sample has the longest draft, of which recorded runs have 3 in 2,626
    (`benchmarks/graph_padding.py`). For their sake vLLM 0.29.0 rounds the sizes of all graphs up to multiples of the
    longest draft and one: a sample without drafts computes 33 rows. PIECEWISE graphs keep their sizes.
    """
    return {"compilation_config": {"cudagraph_mode": "PIECEWISE"}} if gpu_present() else {}


# Requests before a run's first, prompt tokens of each and tokens of each answer: a prefill and a decode step of more
# than one sample. And the prompt that they say they are of, as a run's requests do.
REHEARSAL, REHEARSED = (2, 8, 2), "rehearsal"
# What OpenRLHF's executor asks for; whoever asks for more (`rhyme verify`) reads more.
UPSTREAM_LOGPROBS = 1


def leave_out_unread(parameters: SamplingParams) -> None:
    """Do not ask vLLM for what OpenRLHF's single-turn executor never reads (openrlhf/utils/agent.py).

    It takes token ids and the sampled token's log-probability. Text costs as much CPU time a token as a small model's
    forward pass, and is needed only to find stop strings; `logprobs=1` adds the likeliest token to the sampled one,
    for a top-k over the vocabulary. What is sampled stays the same.
    """
    parameters.detokenize = bool(parameters.stop)
    if parameters.logprobs == UPSTREAM_LOGPROBS:
        parameters.logprobs = 0


class RhymeRolloutActor(StepMeasuring, SeededRolloutActor):
    """One vLLM engine of a run. `index` is its number; `history_workers` are Ray actor handles (may be empty)."""

    # Ray awaits an actor's constructor; upstream's is one too.
    async def __init__(  # type: ignore[misc]
        self, *args: Any, rhyme: RhymeSettings, index: int, history_workers: list[Any], **kwargs: Any
    ) -> None:
        self.index = index
        self.weight_version = 0
        self._running: set[str] = set()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._reported = EngineCounters()
        self._traced: frozenset[str] = frozenset()
        self._timeline = EngineTimeline(time.time())
        # The state of its timeline while it runs nothing.
        self._rests = "idle"
        kwargs.update(rhyme.engine.arguments())
        self._unspeculated = unspeculated_steps.Unspeculated()
        if unspeculated_steps.are_wanted(rhyme, index, kwargs):
            plain = dataclasses.replace(rhyme, histospec=dataclasses.replace(rhyme.histospec, enable=False))
            arguments = {**kwargs, **speculation_arguments(plain)}
            start = partial(super().__init__, *args, rhyme=plain, **arguments)
            self._unspeculated = await unspeculated_steps.measured(self, start, kwargs["tensor_parallel_size"])
        kwargs.update(self.plugins(rhyme))
        # Upstream's constructor names the class as a module global, in this process.
        upstream.SingleTurnAgentExecutor = partial(CheckedExecutor, limit_s=rhyme.limits.reward_s)
        await super().__init__(*args, rhyme=rhyme, **kwargs)
        if rhyme.histospec.enable and rhyme.drafting.source == NGRAM:
            await self.llm.collective_rpc("rhyme_look_up_serially")
        if not rhyme.weights_by_buffer:
            await self.llm.collective_rpc("rhyme_check_broadcast")
        workers = history_workers if rhyme.drafts_from_history else []
        self._history = HistoryFeed(workers, self.call_scheduler, rhyme.history.fetch_timeout_s)
        self._in_flight = HistoriesInFlight(self._history)
        await self._start_the_rest()

    async def _start_the_rest(self) -> None:
        """What else an engine starts once, now: else it is time of the first rollout stage.

        The first requests load plug-ins and start threads here, and kernels in the workers. And this process has
        hundreds of thousands of objects when all is imported, which Python's next full garbage collection goes through:
        about half a second in which no request gets to vLLM, soon after the first ones. vLLM's own server, in whose
        place this actor stands, leaves them out of all collections, as it does in its engine core; so do we.
        """
        async with asyncio.timeout(self.rhyme.limits.stage_s):
            await self._run(*REHEARSAL, {PROMPT_KEY: REHEARSED})
        freeze_gc_heap()

    @staticmethod
    def plugins(rhyme: RhymeSettings) -> dict[str, Any]:
        """vLLM engine arguments of ours."""
        return speculation_arguments(rhyme)

    async def call_scheduler(self, method: str, *arguments: Any) -> Any:
        """Call a method of this engine's scheduler (engine/scheduler.py)."""
        return await core_channel.call_scheduler(self.llm, method, *arguments)

    async def generate_responses(self, prompt: str, *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
        """The responses to one prompt, as upstream, with the prompt's history installed beside."""
        key = prompt_key(prompt)
        fetch = self._in_flight.begin(key)
        try:
            await self._wait_for_history(fetch)
            responses: list[dict[str, Any]] = await super().generate_responses(prompt, *args, **kwargs)
            for response in responses:
                check_finite(response)
            await self._add_traces(responses)
            return responses
        finally:
            await self._in_flight.end(key)

    async def _wait_for_history(self, fetch: asyncio.Task[None] | None) -> None:
        """Until an index is there, in a reproducible run; else samples never wait for one."""
        if self.rhyme.run.reproducible and fetch is not None:
            await asyncio.wait([fetch], timeout=self.rhyme.history.fetch_timeout_s)

    def trace_prompts(self, keys: list[str]) -> None:
        """From now on, note of the samples of these prompts (`prompt_key`), and of no others, what was drafted."""
        self._traced = frozenset(keys)

    async def _add_traces(self, responses: list[dict[str, Any]]) -> None:
        """Add to the responses' rounds what the scheduler noted of them."""
        rounds = [one for response in responses for one in response[ROUNDS] if one.trace]
        if not rounds or not self.rhyme.histospec.enable:
            return
        try:
            traces = await self.call_scheduler("take_traces", [one.trace for one in rounds])
        except EngineDeadError:
            raise EngineCoreError(self._core_died()) from None
        for one, trace in zip(rounds, traces, strict=True):
            one.drafted, one.spans = trace["drafted"], trace["spans"]

    async def generate(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, multi_modal_data: Any = None
    ) -> RequestOutput:
        """One request to the engine. Same contract as upstream's method, which it replaces.

        Only the final output is built (upstream has vLLM build one after every step and drops all but the last), and
        only what upstream's executor reads of it.
        """
        await self._may_start.wait()
        if multi_modal_data and self._mm_pad_token_ids:
            prompt_token_ids = dedup_media_tokens(prompt_token_ids, self._mm_pad_token_ids)
        prompt = TokensPrompt(prompt_token_ids=prompt_token_ids, cache_salt=f"weights-{self.weight_version}")
        if multi_modal_data:
            prompt["multi_modal_data"] = multi_modal_data
        parameters = sampling_params.clone()
        parameters.output_kind = RequestOutputKind.FINAL_ONLY
        if type(self.executor) is CheckedExecutor:
            leave_out_unread(parameters)
        self.seed_request(parameters, len(prompt_token_ids))
        request_id = random_uuid()
        identity = current_sample.get()
        noted = None
        if identity is not None:
            key = prompt_key(identity.prompt)
            of_round, fetch = self._in_flight.round(key, len(identity.rounds))
            noted = Round(self.index, self.weight_version, len(prompt_token_ids))
            identity.rounds.append(noted)
            parameters.extra_args = {**(parameters.extra_args or {}), PROMPT_KEY: of_round}
            if key in self._traced:
                noted.trace = parameters.extra_args[TRACE] = request_id
            await self._wait_for_history(fetch)
        self._started(request_id)
        try:
            # FINAL_ONLY: there is exactly one.
            outputs = [output async for output in self.llm.generate(prompt, parameters, request_id=request_id)]
        except EngineDeadError:
            raise EngineCoreError(self._core_died()) from None
        finally:
            self._ended(request_id)
        if noted is not None:
            noted.end(self.weight_version, outputs[-1].outputs[0])
        return outputs[-1]

    def _started(self, request_id: str) -> None:
        if not self._running:
            self._timeline.enter("generate", time.time(), self.weight_version)
        self._running.add(request_id)

    def _ended(self, request_id: str) -> None:
        self._running.discard(request_id)
        if not self._running:
            self._timeline.enter(self._rests, time.time(), self.weight_version)

    # --- weights

    async def load_weights(self, segment: Segment) -> float:
        """Load a weight version; returns the seconds it took.

        Raises WeightLoadError when samples run (and the engine is not paused for partial rollout), or when a worker
        reports another version than asked for.
        """
        if self._running and self._may_start.is_set():
            raise WeightLoadError(
                f"engine {self.index} was told to load weight version {segment.version} while "
                f"{len(self._running)} samples run with version {self.weight_version}"
            )
        started = time.time()
        self._timeline.enter("sync", started, self.weight_version)
        was_open = self._may_start.is_set()
        self._may_start.clear()
        try:
            versions = await self.llm.collective_rpc("rhyme_load_weights", args=(segment.to_plain(),))
            if set(versions) != {segment.version}:
                raise WeightLoadError(f"engine {self.index} loaded {versions} instead of version {segment.version}")
            await self.llm.reset_prefix_cache()
            self.weight_version = segment.version
        finally:
            if was_open:
                self._may_start.set()
            self._timeline.enter("generate" if self._running else self._rests, time.time(), self.weight_version)
        return time.time() - started

    async def pause_generation(self) -> None:
        """Freeze running samples and drop their KV cache; new ones wait (partial rollout, before a weight load)."""
        self._may_start.clear()
        await super().pause_generation()

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`; frozen samples recompute their KV cache with the weights now loaded."""
        await super().resume_generation()
        self._may_start.set()

    def set_weight_version(self, version: int) -> None:
        """Note the version that OpenRLHF's own broadcast just brought (`--weights.transport openrlhf`)."""
        self.weight_version = version

    def get_weight_version(self) -> int:
        """The version of the weights this engine runs."""
        return self.weight_version

    # --- what the run record asks

    async def begin_rollout(self) -> None:
        """A rollout stage begins: what was done since the last one (an evaluation, a weight check) is none of it."""
        self._reported = await self._totals()
        await self._planning("take_decisions", {})

    async def progress(self) -> dict[str, int | float]:
        """Counters since `begin_rollout`; RUNNING: the samples that run now; KV_CACHE: its share in use."""
        answer = await self.call_scheduler("read_counters")
        done = (EngineCounters.from_dict(answer) - self._reported).to_dict()
        return {**done, RUNNING: len(self._running), KV_CACHE: answer[KV_CACHE]}

    async def _totals(self) -> EngineCounters:
        return EngineCounters.from_dict(await self.call_scheduler("read_counters"))

    async def rollout_report(self, rollout_start: float, rollout_end: float) -> dict[str, Any]:
        """What this engine did: since `begin_rollout` counters and what was decided to draft (fields of a DraftBudget
        event), since the last report timeline and problems (sentences); and what drafts gain (of a DraftGain event).

        Times are unix seconds of the rollout stage; idle time within it gets its cause.
        """
        return {
            "counters": (await self._totals() - self._reported).to_dict(),
            "intervals": self._timeline.take(rollout_start, rollout_end),
            "weight_version": self.weight_version,
            "problems": [*self._history.take_problems(), *await self._planning("take_sentences", [])],
            "decisions": await self._planning("take_decisions", {}),
            "gain": await self._planning("read_gain", {}),
        }

    def unspeculated(self) -> unspeculated_steps.Unspeculated:
        """Return the decode steps of an engine without speculation, as measured before this one started."""
        return self._unspeculated

    async def _planning(self, method: str, without: Any) -> Any:
        """What the scheduler tells of its planning; `without` speculation it plans nothing."""
        return await self.call_scheduler(method) if self.rhyme.histospec.enable else without

    async def alive(self) -> None:
        """Answers while this engine can generate. Raises EngineCoreError when its vLLM process is gone."""
        try:
            await self.llm.check_health()
        except EngineDeadError:
            raise EngineCoreError(self._core_died()) from None

    def _core_died(self) -> str:
        return f"the vLLM engine core of engine {self.index} (a child of process {os.getpid()}) died or failed"

    def node_id(self) -> str:
        """The Ray node this engine runs on."""
        return ray.get_runtime_context().get_node_id()

    async def node_ids(self) -> list[str]:
        """Return the Ray nodes of this engine: the actor's, then those of its tensor-parallel ranks."""
        ranks = await self.llm.collective_rpc("rhyme_node")
        own = self.node_id()
        return list(dict.fromkeys([own, *(node or own for node in ranks)]))
