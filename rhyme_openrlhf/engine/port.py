"""Calls from other processes to an engine's actor, without waiting or with a limit; and the engines that prompts go to.

Invariants:
- A call names a method of calls.py.
- A lost engine or vLLM process is always an EngineLost, in every form in which the loss shows.
- A call over a broken connection is made again, because the engine may be well; so every call is safe to make twice.
- A call of a `LivePort` ends as soon as its engine is known to be lost.
- A measurement gets an EngineCallError for every failure.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Concatenate

from rhyme_openrlhf.engine.calls import EnginePort, MeasuringCalls, P, R, RemoteMethod, SampleCalls
from rhyme_openrlhf.engine.messages import Progress, SampleRequest, Started
from rhyme_openrlhf.engine_errors import EngineCallError, EngineCoreError, EngineLost, OrderFailed, last_line
from rhyme_openrlhf.engine_losses import ASK_AGAIN_SECONDS, UNREACHED_SECONDS, EngineLosses, engines_left, out_of_reach
from rhyme_openrlhf.latency.measure import BESIDE_STEPS, OWN_STEPS, PrefillShape, StepShape
from rhyme_openrlhf.telemetry.services import Layouts


class RayEngine:
    """An engine in a Ray actor, as the samples' home calls it (`EnginePort`)."""

    def __init__(self, number: int, handle: Any) -> None:
        self._number = number
        self._handle = handle

    async def call(self, method: RemoteMethod[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the method answers. Raises as `EnginePort.call`."""
        import ray
        from vllm.v1.engine.exceptions import EngineDeadError

        name, clock = method.__name__, asyncio.get_running_loop().time
        limit = 0.0
        while True:
            try:
                answer: R = await getattr(self._handle, name).remote(*args, **kwargs)
                return answer
            except ray.exceptions.ActorUnavailableError as error:
                limit = limit or clock() + UNREACHED_SECONDS
                if clock() > limit:
                    ray.kill(self._handle)
                    raise EngineLost(out_of_reach(self._number), self._number) from error
            except (ray.exceptions.RayActorError, EngineCoreError, EngineDeadError) as error:
                # An error of a task is raised as one of its cause's class, too.
                raise EngineLost(f"engine {self._number} is gone: {last_line(error)}", self._number) from error
            except TimeoutError:
                raise
            except ray.exceptions.RayError as error:
                raise OrderFailed(f"engine {self._number} failed to {name}: {last_line(error)}") from error
            await asyncio.sleep(ASK_AGAIN_SECONDS)


class LivePort:
    """Engine `number` behind `port`; its loss is published in `losses`, or heard from there."""

    def __init__(self, number: int, port: EnginePort, losses: EngineLosses) -> None:
        self.number = number
        self.port = port
        self._losses = losses
        self._calls: set[asyncio.Timeout] = set()
        # By place, the samples that the next call starts; and that call, or the last one.
        self._coming: dict[str, tuple[SampleRequest, Progress | None]] = {}
        self._starting: asyncio.Task[dict[str, Started]] | None = None
        losses.subscribe(self._end_calls)

    @property
    def alive(self) -> bool:
        """Return whether it is not lost."""
        return self.number not in self._losses

    async def call(self, method: RemoteMethod[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the method answers. Raises as `EnginePort.call`, and EngineLost as soon as the loss is known.

        vLLM leaves a call unanswered whose engine core dies with it.
        """
        if self.alive:
            try:
                async with asyncio.timeout(None) as call:
                    self._calls.add(call)
                    try:
                        return await self.port.call(method, *args, **kwargs)
                    finally:
                        self._calls.discard(call)
            except EngineLost as error:
                self._losses.publish(self.number, str(error))
            except TimeoutError:
                # The method's own, or the end of this call.
                if self.alive:
                    raise
        raise EngineLost(self._losses.reason(self.number), self.number)

    def _end_calls(self, number: int, reason: str) -> None:
        if number == self.number:
            for call in self._calls:
                call.reschedule(0.0)

    async def problem(self, limit_s: float, method: RemoteMethod[P, Any], *args: P.args, **kwargs: P.kwargs) -> str:
        """Have the engine do something within a limit in seconds; return "" or why it is not done.

        An engine that is gone has nothing to do.
        """
        try:
            async with asyncio.timeout(limit_s):
                await self.call(method, *args, **kwargs)
        except EngineLost:
            return ""
        except TimeoutError:
            return f"{method.__name__} was not answered by engine {self.number} within {limit_s:g} s"
        except OrderFailed as error:
            return str(error)
        return ""

    async def start(self, place: str, request: SampleRequest, progress: Progress | None) -> Started:
        """Start a sample. Raises as `call`.

        Those that come while a call is under way go together in the next: a prompt group's come at the same moment.
        """
        self._coming[place] = request, progress
        if len(self._coming) == 1:
            self._starting = asyncio.create_task(self._start(self._starting))
        assert self._starting is not None
        return (await asyncio.shield(self._starting))[place]

    async def _start(self, before: asyncio.Task[Any] | None) -> dict[str, Started]:
        if before is not None:
            await asyncio.wait([before])
        together, self._coming = self._coming, {}
        return dict(zip(together, await self.call(SampleCalls.start_samples, together), strict=True))

    async def discard(self, place: str) -> None:
        """End a sample here, if it is here. Raises as `call`."""
        if self._starting is not None:
            # A start may be on its way, and over a broken connection it is ordered again.
            await asyncio.wait([self._starting])
        await self.call(SampleCalls.discard_sample, place)


def prompt_engines_left(engines: Sequence[Any], layouts: Layouts | None) -> list[int]:
    """Return of `engines_left` those that prompts go to: none of a tail layout."""
    left = engines_left(engines)
    return left if layouts is None else layouts.aligned(left)


def _waiting(method: RemoteMethod[P, R]) -> Callable[Concatenate[MeasuredEngine, P], R]:
    """Return a method of MeasuredEngine that calls the actor's and waits for its answer."""

    def call(self: MeasuredEngine, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.together(method, [self.actor], *args, **kwargs)[0]

    return call


class MeasuredEngine:
    """An engine's `MeasuringCalls` as calls that wait, for latency/measure.py; each raises EngineCallError."""

    def __init__(self, actor: Any, limit_s: float, beside: Sequence[Any] = ()) -> None:
        """`limit_s`: seconds any call may take; `beside`: engines that do the same whenever this one is measured."""
        self.actor = actor
        self._limit_s = limit_s
        self._beside = tuple(beside)

    subject = _waiting(MeasuringCalls.subject)
    limits = _waiting(MeasuringCalls.limits)
    kv_bytes_per_token = _waiting(MeasuringCalls.kv_bytes_per_token)
    padded_rows = _waiting(MeasuringCalls.padded_rows)
    kv_bandwidth = _waiting(MeasuringCalls.kv_bandwidth)
    weight_load = _waiting(MeasuringCalls.weight_load)
    unspeculated = _waiting(MeasuringCalls.unspeculated)
    kept_profile = _waiting(MeasuringCalls.kept_profile)
    keep_profile = _waiting(MeasuringCalls.keep_profile)
    install_profile = _waiting(MeasuringCalls.install_profile)

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
        """Return (running, context, drafts, seconds) of decode steps of this shape."""
        method = MeasuringCalls.decode_steps
        if not self._beside:
            return self.together(method, [self.actor], shape, steps)[0]
        others = self._ask(method, self._beside, shape, BESIDE_STEPS * steps)
        (own,) = self.together(method, [self.actor], shape, OWN_STEPS * steps)
        self._answers(others, method, shape)
        return own[len(own) // 2 :]

    def prefill(self, shape: PrefillShape) -> float:
        """Return the seconds of a prefill."""
        return statistics.fmean(self.together(MeasuringCalls.prefill, [self.actor, *self._beside], shape))

    def together(self, method: RemoteMethod[P, R], actors: Sequence[Any], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Have actors do the same at once; return what each answers."""
        return self._answers(self._ask(method, actors, *args, **kwargs), method, *args)

    @staticmethod
    def _ask(method: RemoteMethod[P, R], actors: Sequence[Any], *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        return [getattr(actor, method.__name__).remote(*args, **kwargs) for actor in actors]

    def _answers(self, asked: list[Any], method: RemoteMethod[Any, R], *arguments: object) -> list[R]:
        import ray

        named = (str(argument) for argument in arguments if not isinstance(argument, str))
        words = " ".join([method.__name__.replace("_", " "), *named])
        try:
            answers: list[R] = ray.get(asked, timeout=self._limit_s)
            return answers
        except ray.exceptions.GetTimeoutError:
            raise EngineCallError(f"waited {self._limit_s:g} s for an engine: {words}") from None
        except ray.exceptions.RayError as error:
            raise EngineCallError(f"an engine failed: {words}: {last_line(error)}") from error
