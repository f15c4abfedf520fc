"""Marks of tests, by what each one starts; a test starts nothing that it has no mark for.

A fixture `starts_X` stands for starting an X. Each fixture that starts one requests it, and so does a test that starts
one by itself. At collection, pytest knows all fixtures that a test requests, directly or through others. A test with
`starts_X` among them gets the mark X. Tiers (scripts/test.sh) and queues (tests/side_by_side.py) go by these marks.
"""

from __future__ import annotations

import multiprocessing.process
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

PREFIX = "starts_"
# Each mark, and whether a command line is one that only a test with the mark starts.
PROCESSES: dict[str, Callable[[list[str]], bool]] = {
    # The first process of every Ray, and the command that begins one.
    "ray": lambda words: "gcs_server" in names(words) or "ray.scripts.scripts" in words,
    "e2e": lambda words: words[3:4] in (["train"], ["demo"]) and RHYME in words and "--run.dir" in words,
    "browser": lambda words: names(words)[0] == "node" and "playwright" in words[0],
    "postgresql": lambda words: "temporary_postgresql.py" in names(words),
    "service": lambda words: RHYME in words and "serve" in words,
    # Importing the package takes such a process a second, and torch ten.
    "python": lambda words: names(words)[0].startswith("python") and MODEL_INSPECTION not in words,
}
RHYME = "rhyme_openrlhf.cli.main"
# vLLM looks at a model's class in another Python and keeps on the disk what it saw: the first engine of a machine does.
MODEL_INSPECTION = "vllm.model_executor.models.registry"
# urllib3 binds a socket for a moment when it is imported, to see whether the machine has IPv6.
IPV6_PROBE = "_has_ipv6"
# vLLM starts its engine core as a process of this name, which has no command line.
ENGINE_CORE = "EngineCore"


def names(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without their folders."""
    return [os.path.basename(word) for word in words]


@pytest.fixture(scope="session")
def starts_engine() -> None:
    """Stand for a vLLM engine, or for a model that takes as much memory."""


@pytest.fixture(scope="session")
def starts_ray() -> None:
    """Stand for a Ray."""


@pytest.fixture(scope="session")
def starts_cluster() -> None:
    """Stand for a cluster: several nodes, or several GPUs, that a Ray or engines pretend to have."""


@pytest.fixture(scope="session")
def starts_e2e() -> None:
    """Stand for a training run on Ray, DeepSpeed and vLLM."""


@pytest.fixture(scope="session")
def starts_browser() -> None:
    """Stand for a Chromium."""


@pytest.fixture(scope="session")
def starts_postgresql() -> None:
    """Stand for a PostgreSQL server."""


@pytest.fixture(scope="session")
def starts_service() -> None:
    """Stand for a process of `rhyme serve`."""


@pytest.fixture(scope="session")
def starts_python() -> None:
    """Stand for another process of Python."""


@pytest.fixture(scope="session")
def starts_listener() -> None:
    """Stand for a socket of this process that listens on a port."""


def marks_of(fixtures: Sequence[str], parameters: Sequence[Any]) -> set[str]:
    """Return the marks of a test with these fixtures and parameters.

    A fixture with one parameter a store asks for PostgreSQL only when the parameter says "postgresql".
    """
    found = {name.removeprefix(PREFIX) for name in fixtures if name.startswith(PREFIX)}
    return found | ({"postgresql"} & {one for one in parameters if isinstance(one, str)})


def mark(item: pytest.Item) -> None:
    """Give `item` the marks of what it starts."""
    call = getattr(item, "callspec", None)
    for name in sorted(marks_of(getattr(item, "fixturenames", ()), tuple(call.params.values()) if call else ())):
        item.add_marker(name)


class Guard:
    """Refuses what the test that runs now has no mark for."""

    def __init__(self) -> None:
        self.item: pytest.Item | None = None

    def install(self) -> None:
        """Look at every process that Python starts from now on."""
        sys.addaudithook(self._audit)
        start = multiprocessing.process.BaseProcess.start

        def start_process(process: Any) -> None:
            if process.name.startswith(ENGINE_CORE):
                self.refuse("engine")
            # A fork imports nothing. What belongs to an engine, or to a service, has the mark of the greater one.
            elif type(process)._start_method in ("spawn", "forkserver") and not self._marked():
                self.refuse("python")
            start(process)

        multiprocessing.process.BaseProcess.start = start_process  # type: ignore[method-assign]

    def _audit(self, event: str, given: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and self.item is not None:
            command = given[1]
            words = [os.fsdecode(one) for one in ([command] if isinstance(command, (str, bytes)) else command)] or [""]
            started = [name for name, starts in PROCESSES.items() if starts(words)]
            # What starts a service, or a Ray, starts Python too and has the mark of the greater one.
            if started and not (started == ["python"] and self._marked()):
                self.refuse(started[0])
        # An address of the internet family is a tuple; what starts processes may listen for them. The frame above this
        # one is that of the function that binds.
        elif (
            event == "socket.bind"
            and isinstance(given[1], tuple)
            and not self._marked()
            and sys._getframe(1).f_code.co_name != IPV6_PROBE
        ):
            self.refuse("listener")

    def _marked(self) -> bool:
        """Return whether the test that runs now has any of the marks."""
        return self.item is not None and any(map(self.item.get_closest_marker, (*PROCESSES, "engine")))

    def refuse(self, name: str) -> None:
        """Fail the test unless it has the mark. No `except Exception` of the code under test swallows this."""
        if self.item is None or self.item.get_closest_marker(name):
            return
        pytest.fail(f"this test starts '{name}': ask for the fixture {PREFIX}{name} where it is started")


GUARD = Guard()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tell the guard which test runs, its fixtures' setup and end included."""
    GUARD.item = item
    try:
        return (yield)
    finally:
        GUARD.item = None
