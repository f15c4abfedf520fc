"""The load of the ingestion's benchmark: a recorded run's events, sent again and again as by runs that go on for long.

Times, steps and sequences count on from one repetition to the next; kinds, sizes and values are the recording's.
"""

from __future__ import annotations

import json
import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

RECORDED = Path(__file__).parents[1] / "tests" / "data" / "recorded_run.jsonl"
# What the reporter sends at most (telemetry/reporter.py).
BATCH_EVENTS = 2000


class Recording:
    """The recorded run as a template that is filled in for each repetition."""

    def __init__(self, path: Path = RECORDED) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row for row in rows if row["kind"] not in ("run_started", "run_finished")]
        self.events = len(rows)
        self.steps = max(row.get("step", 0) for row in rows)
        self._lines = []
        counts: dict[str, int] = defaultdict(int)
        first = rows[0]["time"]
        self._seconds = rows[-1]["time"] - first
        for row in rows:
            fields = {"time": "%.6f", "sequence": "%d"}
            values = [row["time"], counts[row["source"]]]
            counts[row["source"]] += 1
            for name in ("step", "start", "end"):
                if name in row:
                    fields[name] = "%d" if name == "step" else "%.6f"
                    values.append(row[name])
            marked = {key: f"@{fields[key]}@" if key in fields else value for key, value in row.items()}
            template = json.dumps(marked).replace("%", "%%")
            for form in set(fields.values()):
                template = template.replace(f'"@%{form}@"', form)
            # In the order in which they stand in the line.
            names = [name for name in row if name in fields]
            of = dict(zip(fields, values, strict=True))
            kinds = [row["source"] if name == "sequence" else name for name in names]
            self._lines.append((template, [of[name] for name in names], kinds))
        self._per_source = dict(counts)

    def lines(self, repetition: int) -> Iterator[str]:
        """Return the JSON lines of one repetition, each counting on where the one before ended."""
        steps, seconds = repetition * self.steps, repetition * self._seconds
        shifts = {"step": steps, "time": seconds, "start": seconds, "end": seconds}
        for source, count in self._per_source.items():
            shifts[source] = repetition * count
        for template, values, kinds in self._lines:
            yield template % tuple(value + shifts[kind] for value, kind in zip(values, kinds, strict=True))


@dataclass
class Reporter:
    """One run's sender: an endless stream of batches."""

    run_uid: str = field(default_factory=lambda: secrets.token_hex(8))
    attempt_uid: str = field(default_factory=lambda: secrets.token_hex(8))
    steps: int = 0

    def batches(self, recording: Recording) -> Iterator[bytes]:
        """Bodies of requests."""
        lines: list[str] = []
        for repetition in range(1_000_000_000):
            lines += recording.lines(repetition)
            self.steps = (repetition + 1) * recording.steps
            while len(lines) >= BATCH_EVENTS:
                yield ('{"events": [' + ", ".join(lines[:BATCH_EVENTS]) + "]}").encode()
                del lines[:BATCH_EVENTS]
