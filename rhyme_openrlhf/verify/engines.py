"""Two engines to compare: one that speculates and one that does not, otherwise as a run with these flags has them.

Invariants:

- OpenRLHF's own `create_vllm_engines` chooses every argument of an engine, as in a run. Only number format, GPU memory
  fraction and speculation are the check's.
- At most one pair is alive. Every wait has a limit, and Ray's errors become a VerifyError.
- Where the cluster has GPUs for both, each engine has its own. Else they share the GPUs of one, each with half of the
  fraction that one would get.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.engine_errors import last_line
from rhyme_openrlhf.platform import gpu_present, shims

if not gpu_present():
    shims.install()

import numpy as np
import openrlhf.trainer.ray.vllm_engine as upstream
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from rhyme_openrlhf.engine.actor import RhymeRolloutActor
from rhyme_openrlhf.engine.actor_parts.part import Part
from rhyme_openrlhf.engine.calls import CheckedEngine
from rhyme_openrlhf.engine.factory import EngineFactory, parts_of_checked
from rhyme_openrlhf.engine.messages import Answer, Proof, Request
from rhyme_openrlhf.run.process_logs import core_error_of_process
from rhyme_openrlhf.run.resources import SPARE_CPUS
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.drafting import DraftingSettings
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.verify.outcome import VerifyError

# Loading tens of GB from a slow disk and capturing CUDA graphs; two small engines take under a minute.
START_SECONDS = 1200
# One batch of short requests; a CPU with a model of some hundred million parameters needs minutes for one.
ANSWER_SECONDS = 600
# Scheduler calls are answered between two steps.
CALL_SECONDS = 120
# Two engines on one GPU leave this much to CUDA contexts and other programs there.
SHARED_FRACTION = 0.9
# vLLM reserves a KV cache beside the weights; with less than this share of room beside them it does not start.
WEIGHTS_SHARE = 0.8

RolloutActor = ray.remote(RhymeRolloutActor)


@dataclass(frozen=True)
class EngineFacts:
    """An engine's own facts (`AnswerCalls.facts`); GPU memory in bytes after its start, 0 without a GPU."""

    dtype: str
    async_scheduling: bool
    speculates: bool
    model_runner: str
    gpu: str = ""
    gpu_free_bytes: int = 0
    gpu_total_bytes: int = 0

    @property
    def words(self) -> str:
        """Describe vLLM's choices for a person."""
        scheduling = "asynchronous" if self.async_scheduling else "synchronous"
        return f"model runner {self.model_runner}, {scheduling} scheduling"


class Engine:
    """One running engine; plain calls that wait."""

    def __init__(self, actor: CheckedEngine) -> None:
        self.actor = actor
        self.facts = EngineFacts(**wait(actor.facts.remote(), CALL_SECONDS, "an engine to describe itself"))

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answer to each request; all run at once."""
        what = f"{len(requests)} answers of an engine"
        return wait(self.actor.answer.remote(list(requests)), ANSWER_SECONDS, what)

    def next_token_probabilities(self, prompt: Sequence[int]) -> np.ndarray:
        """Return the model's distribution after `prompt`, float64[vocabulary]."""
        asked = self.actor.next_token_log_probs.remote(list(prompt))
        return np.exp(wait(asked, CALL_SECONDS, "a distribution over the vocabulary"))

    def prove(self) -> Proof:
        """Return the engine's proof of its drafts, made now."""
        return wait(self.actor.prove.remote(), ANSWER_SECONDS, "an engine to prove its drafts")

    def install(self, history: str, index: np.ndarray) -> None:
        """Let requests of `history` draft from `index`. Raises VerifyError if the engine refuses it."""
        refused = wait(self.actor.install.remote(history, index), CALL_SECONDS, "a draft index to be installed")
        if refused:
            raise VerifyError(refused)

    def forget(self, history: str) -> None:
        """Drop an installed history."""
        wait(self.actor.forget.remote(history), CALL_SECONDS, "a draft index to be dropped")

    def counters(self) -> EngineCounters:
        """Return the sums of all that the engine did since it started."""
        return EngineCounters.from_dict(wait(self.actor.counters.remote(), CALL_SECONDS, "an engine's counters"))


@dataclass(frozen=True)
class EnginePair:
    """The engine without speculation and the one with it."""

    plain: Engine
    speculating: Engine

    @property
    def chosen(self) -> str:
        """The line of a report about what vLLM chose for both engines."""
        return f"with drafts: {self.speculating.facts.words}; without: {self.plain.facts.words}"

    @property
    def figures(self) -> dict[str, Any]:
        """The same with all facts, as plain JSON values."""
        return {
            "plain": dataclasses.asdict(self.plain.facts),
            "speculating": dataclasses.asdict(self.speculating.facts),
        }


class EnginePool:
    """Ray, and at most one pair of engines; everything is started when it is first asked for."""

    def __init__(
        self,
        args: SimpleNamespace,
        settings: RhymeSettings,
        on_gpus: bool,
        actor: Any = RolloutActor,
        parts: Callable[[Any], dict[type, Part]] = parts_of_checked,
    ) -> None:
        """`actor`: the Ray actor class to make engines of, and `parts` what each has."""
        self._actor = actor
        self._parts = parts
        self._args = args
        self._settings = settings
        self._on_gpus = on_gpus
        self._pair: EnginePair | None = None
        self._dtype = ""
        # Ray's, once it is started.
        self._logs = Path()
        self._actors: list[Any] = []
        self._groups: list[Any] = []

    @property
    def run_dtype(self) -> str:
        """The number format of a run's engines (upstream's create_vllm_engines names bfloat16)."""
        return "bfloat16" if self._on_gpus else self._settings.cpu.dtype

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs of one engine."""
        return self._args.vllm.tensor_parallel_size

    def start_ray(self, engines: int = 2) -> None:
        """Connect to Ray, or start it, with room for `engines` engines."""
        if ray.is_initialized():
            return
        if self._on_gpus:
            context = ray.init(log_to_driver=False, logging_level="ERROR")
        else:
            from rhyme_openrlhf.platform.local_ray import start_local_ray

            slots = engines * self.tensor_parallel_size
            context = start_local_ray(
                slots, slots + SPARE_CPUS, {"TOKENIZERS_PARALLELISM": "true"}, log_to_driver=False
            )
        self._logs = Path(context.address_info["session_dir"]) / "logs"

    def object_store_bytes(self) -> int:
        """Return the size of Ray's object store, of all nodes together."""
        self.start_ray()
        return int(ray.cluster_resources().get("object_store_memory", 0))

    def nodes(self) -> int:
        """Return how many nodes Ray has."""
        self.start_ray()
        return sum(node["Alive"] for node in ray.nodes())

    def pair(self, dtype: str) -> EnginePair:
        """Return the two engines in a number format ("float32", "bfloat16"). Raises VerifyError."""
        if self._pair is None or self._dtype != dtype:
            plain, speculating = self.side_by_side(dtype, (None, self._settings.drafting))
            self._pair, self._dtype = EnginePair(plain, speculating), dtype
        return self._pair

    def side_by_side(self, dtype: str, arms: Sequence[DraftingSettings | None]) -> list[Engine]:
        """Start an engine for each arm, in place of those that ran before: how it drafts, or None: it does not.

        Raises VerifyError.
        """
        self.stop_engines()
        self.start_ray(len(arms))
        shared = self._shares_gpus(len(arms))
        groups = [self._place()] * len(arms) if shared else [self._place() for _ in arms]
        actors = []
        for drafting, group in zip(arms, groups, strict=True):
            actors.append(self._start(dtype, drafting, group, self._fraction(len(arms) if shared else 1)))
            if shared:
                # One after the other: vLLM measures the free memory of a GPU while it starts.
                self._wait_until_ready(actors[-1], dtype)
        for actor in actors:
            self._wait_until_ready(actor, dtype)
        return [Engine(actor) for actor in actors]

    def single(self) -> Any:
        """Start one speculating engine in the run's number format and return its actor. Raises VerifyError."""
        return self.several(1)[0]

    def several(self, engines: int, speculate: bool = True) -> list[Any]:
        """Start several engines like `single`, each with devices of its own, in place of those that ran before."""
        self.stop_engines()
        self.start_ray(max(engines, 2))
        drafting = self._settings.drafting if speculate else None
        actors = [self._start(self.run_dtype, drafting, self._place(), self._fraction(1)) for _ in range(engines)]
        for actor in actors:
            self._wait_until_ready(actor, self.run_dtype)
        return actors

    def _shares_gpus(self, engines: int) -> bool:
        return ray.cluster_resources().get("GPU", 0) < engines * self.tensor_parallel_size

    def _place(self) -> Any:
        """Reserve the GPUs of one engine; upstream's own placement group would be out of reach and never given back."""
        group = placement_group([{"GPU": 1, "CPU": 1}] * self.tensor_parallel_size, strategy="PACK")
        self._groups.append(group)
        wait(group.ready(), CALL_SECONDS, f"{self.tensor_parallel_size} free GPUs")
        return group

    def _fraction(self, engines: int) -> float:
        """Return an engine's share of the memory of GPUs that `engines` have together."""
        own: float = self._args.vllm.gpu_memory_utilization
        return own if engines == 1 else min(own, SHARED_FRACTION) / engines

    def _start(self, dtype: str, drafting: DraftingSettings | None, group: Any, fraction: float) -> Any:
        speculate = drafting is not None
        settings = dataclasses.replace(
            self._settings,
            # Checks draft what they installed: other samples must not come in between.
            histospec=dataclasses.replace(self._settings.histospec, enable=speculate, siblings=False, shared_tokens=0),
            # Nor steps in which drafts are left out to measure their gain: a check counts what was verified.
            drafting=dataclasses.replace(drafting or self._settings.drafting, probe_share=0),
            cpu=dataclasses.replace(self._settings.cpu, dtype=dtype),
        )
        args = self._args
        # Two engines of one seed could sample the same: a history would then be an answer that is still to come.
        seed = args.train.seed + speculate
        factory = EngineFactory(settings, (), seed, self._actor, on_gpus=self._on_gpus, parts=self._parts)
        factory.use(settings, {"max_logprobs": -1, "dtype": dtype})
        upstream.RolloutRayActor = factory
        (actor,) = upstream.create_vllm_engines(
            1,
            args.vllm.tensor_parallel_size,
            args.actor.model_name_or_path,
            seed,
            args.train.full_determinism_enable,
            args.vllm.enable_prefix_caching,
            args.vllm.enforce_eager,
            args.data.max_len,
            group,
            fraction,
            # Two engines that take turns need no sleep; and one that slept could not answer.
            False,
            "processed_logprobs",
        )
        self._actors.append(actor)
        return actor

    def _wait_until_ready(self, actor: Any, dtype: str) -> None:
        try:
            wait(actor.ready.remote(), START_SECONDS, f"an engine in {dtype} to start")
        except VerifyError as error:
            # Ray's text of an actor that could not be made names its process.
            process = re.search(r"\bpid=(\d+)", str(error.__cause__))
            found = core_error_of_process(self._logs, int(process[1])) if process else ""
            if not found:
                raise
            raise VerifyError(f"an engine in {dtype} did not start: {found} (its log is in {self._logs})") from error

    def fits(self, weight_bytes: int) -> bool:
        """Return whether two engines fit, each with `weight_bytes` of weights; on the host they always do."""
        if not self._on_gpus or not gpu_present():
            return True
        import torch

        self.start_ray()
        memory = torch.cuda.get_device_properties(0).total_memory
        room = memory * self._fraction(2 if self._shares_gpus(2) else 1) * WEIGHTS_SHARE
        return weight_bytes / self.tensor_parallel_size < room

    def stop_engines(self) -> None:
        """End the pair that runs, and give its GPUs back."""
        for actor in self._actors:
            # vLLM's own processes by its own means, and the actor in any case.
            with contextlib.suppress(VerifyError):
                wait(actor.stop.remote(), CALL_SECONDS, "an engine to end")
            ray.kill(actor)
        self._pair, self._actors = None, []
        for group in self._groups:
            remove_placement_group(group)
        self._groups = []

    def close(self) -> None:
        """End the engines and Ray, if it was started here; leave a cluster by RAY_ADDRESS alone."""
        if ray.is_initialized():
            self.stop_engines()
            ray.shutdown()


def wait(ref: Any, timeout_s: float, what: str) -> Any:
    """Return the result of a Ray call. Raises VerifyError when it takes too long or fails."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise VerifyError(f"waited {timeout_s:g} s for {what}") from None
    except ray.exceptions.RayError as error:
        raise VerifyError(f"waiting for {what}: {last_line(getattr(error, 'cause', None) or error)}") from error
