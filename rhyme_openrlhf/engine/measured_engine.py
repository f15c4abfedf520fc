"""An engine actor that can be measured (`engine/actor_parts/measuring.py`) as plain calls that wait, with a limit."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import ray

from rhyme_openrlhf.latency.measure import BESIDE_STEPS, OWN_STEPS, Limits, PrefillShape, StepShape
from rhyme_openrlhf.latency.profile import StepPoint, Subject


class EngineCallError(RuntimeError):
    """The engine failed, or did not answer in time; the message says what was waited for."""


class RemoteEngine:
    """Every method is the actor's method of that name; it raises EngineCallError."""

    def __init__(self, actor: Any, limit_s: float, beside: Sequence[Any] = ()) -> None:
        """`limit_s`: seconds any call may take; `beside`: engines that do the same whenever this one is measured."""
        self._actor = actor
        self._limit_s = limit_s
        self._beside = tuple(beside)

    def subject(self) -> Subject:
        """What a profile of it is of."""
        found: Subject = self._call("subject")
        return found

    def limits(self) -> Limits:
        """What it can hold."""
        found: Limits = self._call("limits")
        return found

    def kv_bytes_per_token(self) -> int:
        """Of all layers, on one rank."""
        return int(self._call("kv_bytes_per_token"))

    def padded_rows(self) -> tuple[int, ...]:
        """Token counts to which it pads a step."""
        return tuple(self._call("padded_rows"))

    def decode_steps(self, shape: StepShape, steps: int) -> Sequence[tuple[int, int, int, float]]:
        """(running, context, drafts, seconds) of decode steps of this shape."""
        if not self._beside:
            return list(self._call("decode_steps", shape, steps))
        others = self._ask(self._beside, "decode_steps", shape, BESIDE_STEPS * steps)
        own = list(self._call("decode_steps", shape, OWN_STEPS * steps))
        self._answers(others, "decode_steps", shape)
        return own[len(own) // 2 :]

    def prefill(self, shape: PrefillShape) -> float:
        """Seconds of a prefill."""
        return statistics.fmean(float(seconds) for seconds in self._together("prefill", shape))

    def kv_bandwidth(self) -> tuple[float, str]:
        """Bytes of KV cache a second, one way, per rank; 0 and the reason where it cannot be measured."""
        bandwidth, reason = self._call("kv_bandwidth")
        return float(bandwidth), str(reason)

    def weight_load(self) -> tuple[float, str]:
        """Seconds of loading a weight version; 0 and the reason where it cannot be measured."""
        seconds, reason = self._call("weight_load")
        return float(seconds), str(reason)

    def unspeculated(self) -> tuple[tuple[StepPoint, ...], str]:
        """Return decode steps without speculation that it measured before its start, and why none, if that failed."""
        steps, problem = self._call("unspeculated")
        return steps, problem

    def kept_profile(self) -> tuple[str, str]:
        """The file in which its profile is kept, and the text in it ("": none)."""
        path, text = self._call("kept_profile")
        return path, text

    def keep_profile(self, text: str) -> None:
        """Keep a profile's text there."""
        self._call("keep_profile", text)

    def install_profile(self, text: str) -> str:
        """Let it plan drafts by a profile; returns "" or why not."""
        return str(self._call("install_profile", text))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._wait([self._actor], method, *arguments)[0]

    def _together(self, method: str, *arguments: Any) -> list[Any]:
        return self._wait([self._actor, *self._beside], method, *arguments)

    def _wait(self, actors: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        return self._answers(self._ask(actors, method, *arguments), method, *arguments)

    @staticmethod
    def _ask(actors: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        return [getattr(actor, method).remote(*arguments) for actor in actors]

    def _answers(self, asked: list[Any], method: str, *arguments: Any) -> list[Any]:
        words = " ".join([method.replace("_", " "), *(str(a) for a in arguments if not isinstance(a, str))])
        try:
            answers: list[Any] = ray.get(asked, timeout=self._limit_s)
            return answers
        except ray.exceptions.GetTimeoutError:
            raise EngineCallError(f"waited {self._limit_s:g} s for an engine: {words}") from None
        except ray.exceptions.RayError as error:
            raise EngineCallError(f"an engine failed: {words}: {str(error).strip().splitlines()[-1]}") from error
