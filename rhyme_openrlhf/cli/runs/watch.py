"""A run's events on the terminal, as the lines that `rhyme train` prints, or one of its log files.

Both can be followed. After a broken connection, following continues at the same place. It ends with the run. Following
the events of a run in the queue says what the run waits for.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TextIO

from rhyme_openrlhf.client import Client, ClientError
from rhyme_openrlhf.client.calls import ENDED, PAGE
from rhyme_openrlhf.client.models import Event, LogChunk, RunDetail
from rhyme_openrlhf.telemetry.event_json import EventError, parse
from rhyme_openrlhf.telemetry.events import EngineStep, Recorded, TrainStep
from rhyme_openrlhf.telemetry.metrics import COUNTER_NAMES, EngineCounters
from rhyme_openrlhf.telemetry.progress import LinesDisplay
from rhyme_openrlhf.telemetry.wording import without_controls

# What `rhyme train` makes lines of.
SHOWN_KINDS = (
    "run_started",
    "process_ready",
    "rollout_started",
    "rollout_progress",
    "rollout_finished",
    "weights_published",
    "train_step",
    "evaluation",
    "checkpoint_saved",
    "note",
    "run_finished",
)
LAST_KIND = "run_finished"
POLL_SECONDS = 2.0


class EventLines:
    """Prints a run's events as lines, or as JSON."""

    def __init__(self, client: Client, uid: str, stream: TextIO, as_json: bool) -> None:
        self._client = client
        self._uid = uid
        self._stream = stream
        self._as_json = as_json
        self._display = LinesDisplay(stream)

    def show(self, row: Event) -> None:
        """Print one event of the API; skip an event of a newer kind or form. Raises ClientError."""
        if self._as_json:
            print(json.dumps(row), file=self._stream, flush=True)
            return
        envelope = {"kind": row["kind"], "time": row["time"], "source": row["source"], "sequence": row["sequence"]}
        try:
            recorded = parse({**row["body"], **envelope})
        except EventError:
            return
        if recorded is None:
            return
        if isinstance(recorded.event, TrainStep):
            self._show_engines(recorded, recorded.event.step)
        self._display.show(recorded)

    def _show_engines(self, recorded: Recorded, step: int) -> None:
        """Tell the display what the engines did in a step: their sum, because a run may have a thousand of them."""
        for row in self._client.steps(self._uid, from_step=step, to_step=step):
            sums = {name: row[name] for name in COUNTER_NAMES if name in row}
            counters = EngineCounters(**{**sums, "response_tokens": row["engine_tokens"]})
            self._display.show(replace(recorded, event=EngineStep(step, 0, counters, None)))


def show_events(client: Client, uid: str, last: int, follow: bool, as_json: bool, stream: TextIO) -> None:
    """Print the last `last` events that make a line, and with `follow` also new ones. Raises ClientError."""
    lines = EventLines(client, uid, stream, as_json)
    # The run's first event says how many steps there are, and when it began.
    first = list(client.events(uid, kinds=["run_started"], limit=1))
    rows = list(client.events(uid, kinds=SHOWN_KINDS, direction="desc", limit=last))[::-1]
    if first and rows and rows[0]["id"] > first[0]["id"]:
        rows.insert(0, first[0])
    for row in rows:
        lines.show(row)
    if not follow:
        return
    newest = rows[-1]["id"] if rows else 0
    said = "" if newest else _tell_wait(client, client.run(uid), "")
    for told in client.follow_events(uid, kinds=SHOWN_KINDS, after=newest):
        if told is not None:
            lines.show(told)
            newest = told["id"]
            if told["kind"] != LAST_KIND:
                continue
        # At a ping too: a run that was killed has no last word, and another one may have ended before.
        run = client.run(uid)
        if not newest:
            said = _tell_wait(client, run, said)
        if run["status"] in ENDED:
            # What was stored between the last event and the end.
            late = client.events(uid, kinds=SHOWN_KINDS, direction="desc", limit=PAGE)
            for one in [one for one in late if one["id"] > newest][::-1]:
                lines.show(one)
            return


def waits_for(client: Client, run: RunDetail) -> str:
    """Return what a queued run waits for, or why that is unknown; "" for a run that is not queued."""
    if run["status"] != "queued":
        return ""
    try:
        return next((one["why"] for one in client.queue()["waiting"] if one["uid"] == run["uid"]), "")
    except ClientError as error:
        return f"unknown: {error}"


def _tell_wait(client: Client, run: RunDetail, said: str) -> str:
    """Print on standard error what a queued run waits for, unless that was `said` last; return what is said now."""
    why = waits_for(client, run)
    if why and why != said:
        print(f"the run is in the queue: {without_controls(why)}", file=sys.stderr, flush=True)
    return why


def show_log(
    client: Client, uid: str, attempt: int, name: str, last: int, follow: bool, as_json: bool, stream: TextIO
) -> None:
    """Print the last `last` lines of a log file, and with `follow` also new ones. Raises ClientError."""
    chunk = client.log(uid, attempt, name, tail=last)
    _print_piece(chunk, as_json, stream)
    if not follow:
        return
    ended = False
    for piece in client.follow_log(uid, attempt, name, start=chunk["end"]):
        if piece is not None:
            _print_piece(piece, as_json, stream)
            ended = False
        elif ended:
            # A whole ping after the run's end, nothing came any more.
            return
        else:
            ended = has_ended(client, uid)


def wait_for(client: Client, uid: str, statuses: Iterable[str], limit_s: float, told: Callable[[str], None]) -> str:
    """Wait at most `limit_s` seconds for one of `statuses`, and return the run's status then. Raises ClientError.

    `told` gets each status on the way.
    """
    wanted = frozenset(statuses)
    end = time.monotonic() + limit_s
    shown = ""
    while True:
        status = client.run(uid)["status"]
        if status != shown:
            told(status)
            shown = status
        if status in wanted or time.monotonic() >= end:
            return status
        time.sleep(POLL_SECONDS)


def has_ended(client: Client, uid: str) -> bool:
    """Return True if a run has ended."""
    return client.run(uid)["status"] in ENDED


def _print_piece(chunk: LogChunk, as_json: bool, stream: TextIO) -> None:
    if as_json:
        print(json.dumps(chunk), file=stream, flush=True)
        return
    # In a file or pipe too, because what is read from there comes to a terminal.
    stream.write(without_controls(chunk["text"]))
    stream.flush()
