"""Sends a run's events to a control plane, from a process of its own beside the driver.

    python -m rhyme_openrlhf.telemetry.reporter RUN_DIRECTORY     standard input: a pipe that the driver holds open

Settings come from the directory's config.json, the token from --control.token_file or RHYME_CONTROL_TOKEN. It follows
events.jsonl behind the writers and keeps how far it is in reporter.json. When its standard input closes, because the
driver closed it or died, it sends the rest, for FLUSH_SECONDS at most, and ends.

Invariants:
- It only reads what the run writes, and writes only reporter.json, stop-request.json and its log. So the run does not
  notice when the reporter or the server fails.
- It can be killed at any moment and started again. An event is sent until the server confirms it, and the server drops
  duplicates. Events that the server confirmed and lost are sent again.
- Events that are given up are counted by source, and the server gets the counts.
- Only the standard library is imported, because the reporter must start at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhyme_openrlhf.settings.control import ControlSettings
from rhyme_openrlhf.settings.options import SettingsError, from_mapping
from rhyme_openrlhf.settings.redaction import redact_config
from rhyme_openrlhf.telemetry.batches import (
    BATCH_BYTES,
    REFUSED_CONTENT,
    Batch,
    Outbox,
    batch_body,
    cut_batch,
    event_source,
    excess,
    find_event,
    pause,
)
from rhyme_openrlhf.telemetry.control_connection import (
    UNAUTHORISED,
    Answer,
    ControlConnection,
    TokenError,
    read_token,
)
from rhyme_openrlhf.telemetry.run_directory import (
    CONFIG_FILE,
    EVENTS_FILE,
    REPORTER_FILE,
    STOP_REQUEST,
    TOKEN_VARIABLE,
    strict,
    write_json,
)

# How often the log is looked at, and how old an event may get before it is sent although the batch is small.
POLL_SECONDS = 0.25
BATCH_AGE_SECONDS = 1.0
# An idle run is heard of this often.
HEARTBEAT_SECONDS = 5.0
# How long the rest may take when the run is over; then the process ends, also when a name look-up hangs.
FLUSH_SECONDS = 30.0
# After a driver that was killed, its recorder may still write what was on its way; the reaper ends it within 3 s.
SETTLE_SECONDS = 4.0
# Training comes first (with it, Linux also ranks the disk accesses lower).
NICENESS = 10
LAST_EVENT = "run_finished"
UNKNOWN_ATTEMPT = 409

SENT, NOT_SENT, CANNOT_START = 0, 1, 2


class ReporterError(Exception):
    """The reporter cannot start; the message is one sentence."""


@dataclass(frozen=True)
class Report:
    """A run to report: its directory, its config.json, and the settings in it."""

    run: Path
    config: dict[str, Any]
    settings: ControlSettings

    @property
    def path(self) -> str:
        """The attempt's address below the server's."""
        return f"/api/v1/ingest/attempts/{self.settings.attempt_uid}"

    def announcement(self) -> bytes:
        """Return what a server that did not start the run must know to show it."""
        name = str(self.config["settings"]["run"]["name"])
        # An earlier version may have written the secrets of a run that goes on.
        config = redact_config(self.config)
        who = {"run": self.settings.run_uid, "name": name, "run_directory": str(self.run), "config": config}
        return json.dumps(who).encode()


def read_report(run: Path) -> Report:
    """Return the report of a run directory. Raises ReporterError."""
    try:
        # Strict also where an earlier version wrote it.
        config = strict(json.loads((run / CONFIG_FILE).read_text()))
        settings = from_mapping(ControlSettings, config["settings"]["control"])
        config["settings"]["run"]["name"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReporterError(f"{run / CONFIG_FILE} is not the record of a run: {error}") from error
    except SettingsError as error:
        raise ReporterError(f"{run / CONFIG_FILE}: {error}") from error
    if not (settings.url and settings.run_uid and settings.attempt_uid):
        raise ReporterError(f"{run / CONFIG_FILE} names no control plane: the run was started without --control.url")
    return Report(run.absolute(), config, settings)


class Reporter:
    """Follows one log until `ending` is set and everything is sent."""

    def __init__(self, report: Report, token: str, ending: threading.Event) -> None:
        self._report = report
        self._token = token
        self._ending = ending
        self._connection = ControlConnection(report.settings.url)
        self._log = report.run / EVENTS_FILE
        self._outbox = self._load()
        self._announced = self._forgotten = False
        self._failures = 0
        self._retry_after: float | None = None
        self._problem = ""
        self._last_kind = ""
        # In monotonic seconds, so that a clock that jumps moves nothing.
        self._sent_at = self._grown_at = time.monotonic()
        self._size = 0

    def run(self) -> None:
        """Send until the end."""
        while True:
            # Asked first: what was written before the pipe closed is then seen by the look at the log.
            ending = self._ending.is_set()
            unsent = self._look()
            if not self._announced:
                if not self._announce():
                    self._wait(ending)
                continue
            idle = time.monotonic() - self._sent_at
            due = unsent and (ending or unsent >= BATCH_BYTES or idle >= BATCH_AGE_SECONDS)
            batch = self._next_batch() if due else self._nothing()
            if batch.end > batch.start:
                if self._send(batch, alive=True):
                    continue
            elif ending and self._settled():
                if self._send(batch, alive=False):
                    return
            elif idle >= HEARTBEAT_SECONDS:
                self._send(batch, alive=True)
            self._wait(ending)

    def unsent(self) -> str:
        """Return what is not sent, in words; "" when everything is. Looks at no file."""
        missing = self._size - self._outbox.position
        given_up = sum(self._outbox.given_up.values())
        said = [f"{missing / 1e6:.3f} MB of events are not sent"] if missing > 0 else []
        return ", ".join(said + ([f"{given_up} events were given up"] if given_up else []))

    def _nothing(self) -> Batch:
        return Batch(self._outbox.position, self._outbox.position)

    def _wait(self, ending: bool) -> None:
        seconds = POLL_SECONDS
        if self._failures:
            seconds = pause(self._failures, self._retry_after, random.random(), ending)
        if ending or self._retry_after:
            time.sleep(seconds)
        else:
            # The end of the run ends the pause, unless the server asked for it.
            self._ending.wait(seconds)

    # --- the log

    def _look(self) -> int:
        """Bytes of the log that are not sent; gives up the oldest when they are more than the outbox may hold."""
        try:
            size = self._log.stat().st_size
        except OSError:  # not there yet
            size = 0
        if size != self._size:
            self._size, self._grown_at = size, time.monotonic()
        if size < self._outbox.position:
            self._outbox.start_over()
        bound = self._report.settings.outbox_mb * 1024 * 1024
        if too_many := excess(size - self._outbox.position, bound):
            self._give_up(too_many)
        return size - self._outbox.position

    def _next_batch(self) -> Batch:
        with self._log.open("rb") as file:
            file.seek(self._outbox.position)
            return cut_batch(file, self._outbox.position, self._outbox.most_events)

    def _give_up(self, too_many: int) -> None:
        counts: dict[str, int] = {}
        position = self._outbox.position
        with self._log.open("rb") as file:
            file.seek(position)
            for line in file:
                if position - self._outbox.position >= too_many or not line.endswith(b"\n"):
                    break
                position += len(line)
                source = event_source(line)
                counts[source] = counts.get(source, 0) + 1
        self._outbox.gave_up(counts, position)
        self._save()
        _say(
            f"the oldest {sum(counts.values())} events are not sent: more than --control.outbox_mb "
            f"{self._report.settings.outbox_mb} waited"
        )

    def _settled(self) -> bool:
        """Return whether nothing more will be written to the log."""
        return self._last_kind == LAST_EVENT or time.monotonic() - self._grown_at >= SETTLE_SECONDS

    # --- the server

    def _send(self, batch: Batch, alive: bool) -> bool:
        """Send a batch; True when it is dealt with and the next may follow at once."""
        if batch.end > batch.start and not batch.lines:
            # Nothing of it is an event: there is nothing to send.
            self._outbox.accepted(batch)
            self._save()
            return True
        body = batch_body(time.time(), batch, self._outbox.given_up, alive, self._outbox.known(batch))
        answer = self._exchange("POST", self._report.path + "/batches", body, pack=True)
        if answer.taken:
            if answer.content.get("stop") is True:
                self._request_stop()
            if lost := self._outbox.lost(answer.content.get("next")):
                self._go_back(lost)
                return False
            self._outbox.accepted(batch)
            self._last_kind = batch.last_kind or self._last_kind
            if batch.end > batch.start:
                self._save()
            return True
        if answer.status == UNKNOWN_ATTEMPT:
            # The server's store is not the one it was: it is told again who reports, and everything since.
            self._announced, self._forgotten = False, True
        elif answer.status in REFUSED_CONTENT and batch.lines:
            self._failures = 0
            if self._outbox.refused(batch):
                _say(f"an event is not sent, the server refuses it ({answer.problem}): {batch.lines[0][:200]!r}")
                self._save()
            return True
        return False

    def _go_back(self, lost: Mapping[str, int]) -> None:
        """Send again from the first event that the server has lost, after its store was restored or damaged."""
        try:
            with self._log.open("rb") as file:
                position = find_event(file, lost)
        except OSError:  # the log went with its disk: there is nothing to send again
            position = None
        again = self._outbox.position if position is None else position
        _say(f"the server has lost events of {', '.join(sorted(lost))}: sending again from byte {again} of the log")
        self._outbox.go_back(again, lost)
        self._save()

    def _announce(self) -> bool:
        """Tell the server who reports; False when it does not listen."""
        answer = self._exchange("PUT", self._report.path, self._report.announcement(), pack=False)
        if answer.taken:
            self._announced = True
            if self._forgotten and self._outbox.sent:
                self._outbox.start_over()
            self._forgotten = False
        return self._announced

    def _exchange(self, method: str, path: str, body: bytes, pack: bool) -> Answer:
        answer = self._connection.send(method, path, body, self._token, pack)
        self._sent_at = time.monotonic()
        if answer.taken:
            if self._problem:
                _say(f"{self._report.settings.url} takes events again")
            self._failures, self._problem, self._retry_after = 0, "", None
            return answer
        self._failures += 1
        self._retry_after = answer.retry_after
        # Once a kind of trouble, not once a try: a server may be away for days.
        if answer.problem != self._problem:
            self._problem = answer.problem
            _say(answer.problem)
        if answer.status in UNAUTHORISED:
            self._renew_token()
        return answer

    def _renew_token(self) -> None:
        """Read the token's file again, because it may hold a new one."""
        if self._report.settings.token_file:
            try:
                self._token = read_token(self._report.settings.token_file, "")
            except TokenError as error:
                _say(str(error))

    # --- what is kept beside the log

    def _load(self) -> Outbox:
        try:
            row = json.loads((self._report.run / REPORTER_FILE).read_text())
        except (OSError, ValueError):
            row = None
        return Outbox.from_dict(row, self._report.settings.attempt_uid)

    def _save(self) -> None:
        try:
            write_json(self._report.run / REPORTER_FILE, self._outbox.to_dict(self._report.settings.attempt_uid))
        except OSError:
            # A full disk: without the file, a new start sends again what the server already has.
            return

    def _request_stop(self) -> None:
        path = self._report.run / STOP_REQUEST
        if path.exists():
            return
        try:
            write_json(path, {"requested_at": time.time(), "by": self._report.settings.url})
        except OSError as error:
            # The server says it again with the next answer.
            _say(f"{path} cannot be written: {error.strerror}")
        else:
            _say("the control plane asks the run to stop")


def _say(text: str) -> None:
    try:
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}", file=sys.stderr, flush=True)
    except OSError:
        # Its log's disk is full. Reporting goes on.
        return


def _watch_pipe(ending: threading.Event, reporter: Reporter, run: Path) -> None:
    """Set `ending` when standard input closes; end the process when the rest is not sent in time."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    ending.set()
    time.sleep(FLUSH_SECONDS)
    _say_unsent(reporter, run, f"gave up after {FLUSH_SECONDS:g} s")
    os._exit(NOT_SENT)


def _say_unsent(reporter: Reporter, run: Path, how: str) -> None:
    if unsent := reporter.unsent():
        _say(f"{how}: {unsent}; to bring in all of them later: rhyme runs import {run}")


def main(argv: list[str]) -> int:
    """Report one run; 0 when everything was sent, 1 when something could not be, 2 when it cannot start."""
    parser = argparse.ArgumentParser(
        prog="python -m rhyme_openrlhf.telemetry.reporter",
        description="Send a run's events to its control plane until standard input closes.",
    )
    parser.add_argument("run_directory", type=Path, help="the run directory, with config.json")
    run = parser.parse_args(argv).run_directory
    if hasattr(os, "nice"):
        os.nice(NICENESS)
    # Ray stops a job by SIGTERM to all of its processes: the last events are still to be sent.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        report = read_report(run)
        token = read_token(report.settings.token_file, os.environ.get(TOKEN_VARIABLE, ""))
    except (ReporterError, TokenError) as error:
        _say(f"not reporting: {error}")
        return CANNOT_START
    ending = threading.Event()
    reporter = Reporter(report, token, ending)
    threading.Thread(target=_watch_pipe, args=(ending, reporter, report.run), name="pipe", daemon=True).start()
    reporter.run()
    _say_unsent(reporter, report.run, "everything else is sent")
    return NOT_SENT if reporter.unsent() else SENT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
