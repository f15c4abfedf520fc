"""The ending of a run: its name, and its parts, each run within a time limit whether or not the others failed.

Invariants:
- A part that fails, or that does not come back, costs one line on the terminal, and the next part is run.
- Nothing here raises: not a part's own error, not Ctrl-C (it skips the part that is being run), not a closed terminal.
- A full disk still takes the run's last words: `Reserve` keeps room for them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TextIO, TypeVar

from rhyme_openrlhf.telemetry.events import RunStatus
from rhyme_openrlhf.training.failure import (
    STOPPED_ON_REQUEST,
    TERMINATED,
    TERMINATED_CODE,
    TERMINATED_IN_ORDER,
    Interrupted,
    is_stop_request,
    one_sentence,
)

Result = TypeVar("Result")

# Longer than the limits of what the parts wait for themselves (the recorder 30 s, the reaper 30 s).
PART_SECONDS = 60.0
# For the last event, the summary and the traceback.
RESERVE_BYTES = 256 * 1024
RESERVE_FILE = ".reserve"


class Ending:
    """Runs the parts of an ending one after the other; `failed` has what each failed part was to do."""

    def __init__(self, limit_s: float = PART_SECONDS) -> None:
        """`limit_s` is how long each part may take."""
        self.failed: list[str] = []
        self._limit_s = limit_s

    def part(self, purpose: str, do: Callable[[], Result]) -> Result | None:
        """Return what `do` returns, or None where it failed; `purpose` completes "could not ...".

        It runs in a thread of its own, because some waits (Ray's, a network disk's) end for no signal.
        """
        found: list[Result] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                found.append(do())
            # The ending must go on after any error: SystemExit too, which Ray raises.
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        thread = threading.Thread(target=run, name=purpose, daemon=True)
        try:
            thread.start()
            thread.join(self._limit_s)
        # Ctrl-C, or a signal that Ray handles by SystemExit, or no thread to be had: the part is given up.
        except BaseException as error:  # noqa: BLE001
            errors.append(error)
        if found:
            return found[0]
        why = one_sentence(errors[0]) if errors else f"not done within {self._limit_s:g} s"
        self.failed.append(purpose)
        tell(f"could not {purpose}: {why}")
        return None


def tell(text: str, terminal: TextIO | None = None) -> None:
    """Write a line to the terminal (standard error, if None), if there still is one."""
    with suppress(OSError, ValueError):
        print(f"rhyme train: {text}", file=terminal or sys.stderr, flush=True)


def say(text: str) -> None:
    """Print to standard output, at once. Raises OSError where it takes nothing more (a full disk, a closed pipe).

    Only once: Python would try again when the process ends, and change its exit code.
    """
    try:
        print(text, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        raise


@dataclass(frozen=True)
class Outcome:
    """A run's status and message, as its last event has them, and its exit code."""

    status: RunStatus
    message: str
    code: int


def outcome_of(error: BaseException, terminated: bool, fault: Callable[[], str]) -> Outcome:
    """Return how a run ended whose training raised `error`, of any kind.

    `terminated`: SIGTERM came. `fault()` is what the supervisor explains it by, or "".
    """
    if isinstance(error, Interrupted):
        # Processes that were told to end die before they are asked for.
        found = "" if terminated else fault()
        return Outcome("failed", found, 1) if found else Outcome("stopped", TERMINATED, TERMINATED_CODE)
    if isinstance(error, KeyboardInterrupt):
        return Outcome("stopped", "interrupted", 130)
    if is_stop_request(error):
        if terminated:
            return Outcome("stopped", TERMINATED_IN_ORDER, TERMINATED_CODE)
        return Outcome("stopped", STOPPED_ON_REQUEST, 0)
    if terminated:
        return Outcome("stopped", f"{TERMINATED} ({one_sentence(error)})", TERMINATED_CODE)
    return Outcome("failed", fault() or one_sentence(error), 1)


class Reserve:
    """Room on the disk of a run directory, kept until the run's end."""

    def __init__(self, directory: Path) -> None:
        """Take it. Raises OSError where the disk does not have it."""
        self._path = directory / RESERVE_FILE
        # Written, because a file of a given length alone takes no room on most file systems.
        try:
            self._path.write_bytes(os.urandom(RESERVE_BYTES))
        except OSError:
            # What it took is the room that is left.
            self.release()
            raise

    def release(self) -> None:
        """Give it back; the last words are written next."""
        self._path.unlink(missing_ok=True)


class LossyFile(FileIO):
    """A log file whose disk may refuse what is written: that is lost, and the writer goes on."""

    def write(self, data: object) -> int:
        """Write as much as the disk takes; say that all was."""
        with suppress(OSError):
            super().write(data)  # type: ignore[arg-type]
        return memoryview(data).nbytes  # type: ignore[arg-type]
