"""The reporter's decisions: what it sends next, when it tries again, and what it gives up. Pure: no file, no network.

Invariants:
- The position only grows, except when the log itself became shorter or the server lost what it had confirmed.
- Every line before the position was accepted by the server or is counted by its source in `given_up`.
- A batch that the server refuses for its content is halved until the one bad event is found. It costs that event and
  nothing else, and never loops.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# One batch: small enough to be taken in well under a second, large enough that a request's cost does not count.
BATCH_EVENTS = 2000
BATCH_BYTES = 1024 * 1024
# First pause after a failure, and the longest: a server that is back is noticed before it takes the run for dead.
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0
# While the run has ended and waits for its last events to be sent, patience has a limit: try more often.
LONGEST_LAST_PAUSE_SECONDS = 2.0
# A Retry-After beyond this is taken for a mistake.
LONGEST_RETRY_AFTER_SECONDS = 600.0
# Where a line names no source: it cannot have been written by an EventLog.
UNKNOWN_SOURCE = "unknown"

# Answers that refuse what was sent, not who sent it or when: too large, and not of its form.
REFUSED_CONTENT = frozenset({413, 422})


@dataclass(frozen=True)
class Batch:
    """Whole lines of the log from byte `start` to `end`: those that are events, and what others there were by source.

    `last_kind` is the kind of its last event, "" without one; `following` the sequence behind each source's last event.
    """

    start: int
    end: int
    lines: tuple[bytes, ...] = ()
    unreadable: Mapping[str, int] = field(default_factory=dict)
    last_kind: str = ""
    following: Mapping[str, int] = field(default_factory=dict)


def cut_batch(lines: Iterable[bytes], start: int, most_events: int, most_bytes: int = BATCH_BYTES) -> Batch:
    """Return the next batch of `lines`, which begin at byte `start` of the log.

    A batch has at most `most_events` events and `most_bytes` bytes, but at least one line if a whole one is there. A
    last line without its newline is still being written and belongs to no batch yet.
    """
    taken: list[bytes] = []
    unreadable: dict[str, int] = {}
    following: dict[str, int] = {}
    end, last_kind = start, ""
    for line in lines:
        if not line.endswith(b"\n"):
            break
        if end > start and end + len(line) - start > most_bytes:
            break
        end += len(line)
        row = _object(line)
        kind, source = row.get("kind"), row.get("source")
        if not isinstance(kind, str) or not isinstance(source, str):
            unreadable[UNKNOWN_SOURCE] = unreadable.get(UNKNOWN_SOURCE, 0) + 1
            continue
        taken.append(line.rstrip(b"\n"))
        last_kind = kind
        if isinstance(row.get("sequence"), int):
            following[source] = row["sequence"] + 1
        if len(taken) >= most_events:
            break
    return Batch(start, end, tuple(taken), unreadable, last_kind, following)


def find_event(lines: Iterable[bytes], missing: Mapping[str, int]) -> int | None:
    """Return at which byte of `lines` the first event of a source of `missing` is that has its sequence, or a later."""
    position = 0
    for line in lines:
        row = _object(line)
        sequence, first = row.get("sequence"), missing.get(str(row.get("source")))
        if first is not None and isinstance(sequence, int) and sequence >= first:
            return position
        position += len(line)
    return None


def event_source(line: bytes) -> str:
    """Return the source of a line's event."""
    source = _object(line).get("source")
    return source if isinstance(source, str) else UNKNOWN_SOURCE


def _object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # nested deeper than anything that an EventLog writes
        return {}
    return row if isinstance(row, dict) else {}


def excess(unsent: int, bound: int) -> int:
    """Return how many of `unsent` bytes must be given up so that at most `bound` stay."""
    return max(0, unsent - bound)


def batch_body(
    sent_at: float, batch: Batch, dropped: Mapping[str, int], alive: bool, known: Mapping[str, int]
) -> bytes:
    """Return a batch as the server takes it; `dropped`: given up since the start; `known`: what the server confirmed.

    Events go as the log's own bytes.
    """
    head = json.dumps(
        {"sent_at": sent_at, "dropped": dict(dropped), "heartbeat": {"alive": alive}, "known": dict(known)}
    )
    return head[:-1].encode() + b', "events": [' + b", ".join(batch.lines) + b"]}"


@dataclass
class Outbox:
    """The state of sending a log: `position` in bytes, events sent or given up before it, and the batch size.

    `confirmed`: the sequence behind the last event of each source that the server has confirmed.
    """

    position: int = 0
    given_up: dict[str, int] = field(default_factory=dict)
    sent: int = 0
    most_events: int = BATCH_EVENTS
    confirmed: dict[str, int] = field(default_factory=dict)
    _whole_again_at: int = 0

    def known(self, batch: Batch) -> dict[str, int]:
        """Return what was confirmed of the batch's sources; of all of them for a batch without events."""
        if not batch.lines:
            return self.confirmed
        return {source: self.confirmed[source] for source in batch.following if source in self.confirmed}

    def lost(self, following: object) -> dict[str, int]:
        """Return the sources of which the server has less than it confirmed, by its answer's `next`, and what it has.

        An earlier server gives no `next`.
        """
        if not isinstance(following, dict):
            return {}
        return {
            source: following[source]
            for source, count in self.confirmed.items()
            if isinstance(following.get(source), int) and following[source] < count
        }

    def go_back(self, position: int, lost: Mapping[str, int]) -> None:
        """Send again from `position`, the first event that the server has lost; duplicates do no harm.

        What was given up behind `position` is tried again; what was given up before it, the server has counted.
        """
        self.position, self.given_up = min(position, self.position), {}
        self.confirmed.update(lost)
        self.most_events = BATCH_EVENTS
        self._whole_again_at = 0

    def accepted(self, batch: Batch) -> None:
        """Note that the server has stored all events of the batch, now or before."""
        self._count(batch.unreadable)
        self.sent += len(batch.lines)
        for source, count in batch.following.items():
            self.confirmed[source] = max(count, self.confirmed.get(source, 0))
        self.position = batch.end
        if self.position >= self._whole_again_at:
            self.most_events = BATCH_EVENTS

    def refused(self, batch: Batch) -> bool:
        """Note that the server will never take this batch; return True if it was a single event, which is given up."""
        if len(batch.lines) > 1:
            self.most_events = len(batch.lines) // 2
            self._whole_again_at = max(self._whole_again_at, batch.end)
            return False
        self._count(batch.unreadable)
        self._count({event_source(line): 1 for line in batch.lines})
        self.position = batch.end
        self.most_events = BATCH_EVENTS
        return True

    def gave_up(self, counts: Mapping[str, int], position: int) -> None:
        """Give up the events before `position`; `counts`: how many of them each source wrote."""
        self._count(counts)
        self.position = position

    def start_over(self) -> None:
        """Send from the start, because the log or the server's store was replaced; duplicates do no harm."""
        self.position, self.given_up, self.sent, self.confirmed = 0, {}, 0, {}
        self.most_events = BATCH_EVENTS
        self._whole_again_at = 0

    def _count(self, counts: Mapping[str, int]) -> None:
        for source, count in counts.items():
            self.given_up[source] = self.given_up.get(source, 0) + count

    def to_dict(self, attempt_uid: str) -> dict[str, Any]:
        """Return what is kept beside the log."""
        return {
            "attempt_uid": attempt_uid,
            "position": self.position,
            "given_up": self.given_up,
            "sent": self.sent,
            "confirmed": self.confirmed,
        }

    @classmethod
    def from_dict(cls, row: Any, attempt_uid: str) -> Outbox:
        """Return the state that `to_dict` gave; the start if it is another attempt's or damaged (both harmless)."""
        if not isinstance(row, dict) or row.get("attempt_uid") != attempt_uid:
            return cls()
        position, given_up, sent = row.get("position"), row.get("given_up"), row.get("sent")
        if not isinstance(position, int) or position < 0 or not isinstance(given_up, dict) or not isinstance(sent, int):
            return cls()
        # An earlier version kept none.
        confirmed = row.get("confirmed")
        return cls(
            position, _counts(given_up), sent, confirmed=_counts(confirmed) if isinstance(confirmed, dict) else {}
        )


def _counts(row: Mapping[str, Any]) -> dict[str, int]:
    return {source: count for source, count in row.items() if isinstance(count, int)}


def pause(failures: int, retry_after: float | None, chance: float, ending: bool) -> float:
    """Seconds until the next try after `failures` (from 1) in a row.

    Doubles each time; `chance` from [0, 1) spreads it over its upper half, so that the reporters of many runs do not
    come back at the same moment. What the server asked for (`retry_after`) is the least.
    """
    longest = LONGEST_LAST_PAUSE_SECONDS if ending else LONGEST_PAUSE_SECONDS
    # The exponent is bounded: 2.0 ** 2000 is an OverflowError.
    grown = min(longest, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 32))
    asked = 0.0 if retry_after is None else min(max(retry_after, 0.0), LONGEST_RETRY_AFTER_SECONDS)
    return max(asked, grown * (0.5 + chance / 2))
