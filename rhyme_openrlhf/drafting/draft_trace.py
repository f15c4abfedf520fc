"""Which tokens of chosen requests came from accepted drafts, and from which source. Pure.

Invariants: a request that did not ask costs nothing while none asks, and else a look-up in a dictionary a verified
draft; spans are in order and do not overlap; what nobody takes is dropped, oldest first, so that aborted requests
cannot fill the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Finished traces that wait to be taken: a few prompt groups finish between two calls of the engine's owner.
KEPT = 4096


class _Trace:
    __slots__ = ("drafted", "name", "spans")

    def __init__(self, name: str) -> None:
        self.name = name
        self.drafted = 0
        self.spans: list[tuple[int, int, str]] = []


class DraftTraces:
    """The traces of one engine; one caller at a time."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._running: dict[str, _Trace] = {}
        self._finished: dict[str, _Trace] = {}

    def __len__(self) -> int:
        """Requests that are running and traced."""
        return len(self._running)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request is running and traced."""
        return request_id in self._running

    def start(self, request_id: str, name: str | None) -> None:
        """A request begins; `name` is what its trace will be asked for by, None: it has none."""
        if name is not None:
            self._running[request_id] = _Trace(name)

    def add(self, request_id: str, drafted: int, accepted: int, position: int, source: str) -> None:
        """A step verified a draft that began behind the first `position` response tokens."""
        trace = self._running[request_id]
        trace.drafted += drafted
        if accepted:
            trace.spans.append((position, position + accepted, source))

    def finish(self, request_id: str) -> None:
        """A request has ended or was aborted."""
        trace = self._running.pop(request_id, None)
        if trace is not None:
            self._finished[trace.name] = trace
            if len(self._finished) > self._kept:
                del self._finished[next(iter(self._finished))]

    def take(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """{"drafted": tokens, "spans": [(first, end, source), ...]} of each name, counted in response tokens.

        Each is given once. An unknown one has drafted 0 and no spans.
        """
        nothing = _Trace("")
        found = (self._finished.pop(name, nothing) for name in names)
        return [{"drafted": trace.drafted, "spans": trace.spans} for trace in found]
