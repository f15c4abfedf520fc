"""The one authority on which engines of a run are lost: in each process a set that only grows, with subscriptions.

Who finds a loss publishes it here. Keeper, mover, pipeline, samples generator and weights read the set or subscribe to
it, and decide nothing of their own. Processes agree without a message, because what makes an engine lost is the same
for all of them, and for good:

- Ray says that its actor is dead, or
- its actor says that its vLLM process is gone, or
- it could not be reached for UNREACHED_SECONDS. Then its actor is killed, so that it is dead for everybody.

An engine that is slow, or that cannot be reached for less, is not lost: what was asked of it is asked again.

Invariants:
- Each subscriber hears of each loss once.
- A lost engine's handle is replaced by a `LostEngine`, so that engines keep their numbers.
- A run without an engine ends, and says so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.engine_errors import last_line

# Engines answer between two decode steps; one that does not is not lost.
ALIVE_SECONDS = 10.0
# How long a connection may be broken. Ray takes up to half a minute to find that a node is gone, and its engines dead.
UNREACHED_SECONDS = 90.0
ASK_AGAIN_SECONDS = 0.5


class LostEngine:
    """Answers None to everything it is asked. `number`: of the engine; `reason`: one sentence."""

    def __init__(self, number: int, reason: str) -> None:
        self.number = number
        self.reason = reason

    @property
    def sentence(self) -> str:
        """Return the sentence that the record and the terminal have of it."""
        return f"the run goes on without engine {self.number}, and its samples at the others: {self.reason}"

    def __getattr__(self, method: str) -> Any:
        if method.startswith("__"):
            raise AttributeError(method)
        import ray

        return SimpleNamespace(remote=lambda *args, **kwargs: ray.put(None))


class EngineLosses:
    """The lost engines as one process knows them, by number. For any thread; each process begins with none."""

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._subscribers: list[Callable[[int, str], None]] = []
        self._asked: dict[int, Any] = {}
        self._unreached: dict[int, float] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineLosses, ()

    def __contains__(self, number: int) -> bool:
        return number in self._reasons

    def __len__(self) -> int:
        return len(self._reasons)

    def reason(self, number: int) -> str:
        """Return the sentence that says why an engine is lost."""
        return self._reasons[number]

    def subscribe(self, told: Callable[[int, str], None]) -> None:
        """Have `told(number, reason)` called once for each loss from now on."""
        self._subscribers.append(told)

    def publish(self, number: int, reason: str) -> None:
        """Note that an engine is lost; nothing if that is known."""
        with self._lock:
            if number in self._reasons:
                return
            self._reasons[number] = reason
            self._asked.pop(number, None)
            for told in self._subscribers:
                told(number, reason)

    def look(self, engines: list[Any], wait_s: float = ALIVE_SECONDS) -> list[LostEngine]:
        """Ask engines whether they can generate; replace the lost ones in place, and return what they are replaced by.

        An answer that does not come within `wait_s` seconds is taken in a later look. If there is time to wait, an
        engine that cannot be reached is asked again until it answers or is lost. Raises RuntimeError if no engine is
        left.
        """
        # An answer to an earlier look says nothing of now.
        self._hear(engines, 0.0)
        while self._ask(engines, wait_s) and wait_s:
            time.sleep(ASK_AGAIN_SECONDS)
        found = [LostEngine(number, self.reason(number)) for number in engines_left(engines) if number in self]
        for lost in found:
            engines[lost.number] = lost
        if engines and not engines_left(engines):
            raise RuntimeError(f"all {len(engines)} engines are gone: {'; '.join(engine.reason for engine in engines)}")
        return found

    def _ask(self, engines: list[Any], wait_s: float) -> bool:
        """Ask those of which no answer is awaited, and note what is found; return as `_hear`."""
        with self._lock:
            for number in engines_left(engines):
                if number not in self._asked and number not in self:
                    self._asked[number] = engines[number].alive.remote()
            return self._hear(engines, wait_s)

    def _hear(self, engines: list[Any], wait_s: float) -> bool:
        """Note what the answers say that come within `wait_s`; return whether an engine could not be reached."""
        import ray

        again = False
        with self._lock:
            asked = {ref: number for number, ref in self._asked.items()}
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=wait_s) if asked else ([], [])
            for ref in answered:
                number = asked[ref]
                del self._asked[number]
                try:
                    ray.get(ref)
                    self._unreached.pop(number, None)
                except ray.exceptions.ActorUnavailableError:
                    again = True
                    if self._is_out_of_reach(number):
                        ray.kill(engines[number])
                        self.publish(number, out_of_reach(number))
                except ray.exceptions.RayError as error:
                    self.publish(number, last_line(error))
        return again

    def _is_out_of_reach(self, number: int) -> bool:
        return time.monotonic() - self._unreached.setdefault(number, time.monotonic()) > UNREACHED_SECONDS


def out_of_reach(number: int) -> str:
    """Return the sentence for an engine that is given up."""
    return f"engine {number} could not be reached for {UNREACHED_SECONDS:g} s, and was killed"


def engines_left(engines: Sequence[Any]) -> list[int]:
    """Return the numbers of the engines that were not replaced."""
    return [number for number, engine in enumerate(engines) if not isinstance(engine, LostEngine)]
