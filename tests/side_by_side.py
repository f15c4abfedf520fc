"""Two pytest processes share the tests (`pytest -n 2`, as `scripts/test.sh` does): which tests may run beside which.

Ray takes memory and processors, and finds what another Ray left running; engines take memory. So files that start a Ray
are one queue, one after another, those with engines of this process are a second one, and both begin first. A process
whose queue is empty takes the remaining files, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

# In this order; a file belongs to the first one of whose marks (tests/starts.py) one of its tests has one.
QUEUES = {"Ray": ("e2e", "ray"), "engines": ("engine",)}


def queue_of(marks: set[str]) -> str:
    """Return the queue of a file whose tests have these marks, "" for none."""
    return next((name for name, its in QUEUES.items() if marks.intersection(its)), "")


def queues(items: Sequence[pytest.Item]) -> dict[Path, str]:
    """Return each file's queue, "" for none."""
    marks: dict[Path, set[str]] = {}
    for item in items:
        marks.setdefault(item.path, set()).update(one.name for one in item.iter_markers())
    return {path: queue_of(found) for path, found in marks.items()}


class Reported:
    """A test under the name that it is reported by; everything else is the test's own."""

    def __init__(self, item: pytest.Item, queue: str) -> None:
        self._item = item
        self.nodeid = f"{item.nodeid}@{queue}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._item, name)


@pytest.hookimpl(wrapper=True)
def pytest_collection_finish(session: pytest.Session) -> Iterator[None]:
    """Report tests to the process that hands them out under a name with their queue, `...::test@engines`.

    That process collects none, and so knows no marks.
    """
    items = session.items
    if hasattr(session.config, "workerinput"):
        found = queues(items)
        session.items = [Reported(item, found[item.path]) for item in items]  # type: ignore[misc]
    try:
        return (yield)
    finally:
        session.items = items


def scope(reported: str) -> str:
    """Return what is handed out together with a test that was reported under this name: its queue, or its file."""
    name, _, queue = reported.rpartition("@")
    return queue or name.partition("::")[0]


def unmixed(items: list[pytest.Item], before: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return `items`, which pytest-randomly has mixed: files with engines or Ray first, in the order of `before`.

    Mixed too, files that share an engine would start it again, and the last one would not be the one that kills it.
    """
    order = {item: number for number, item in enumerate(before)}
    found = queues(items)
    return sorted(items, key=lambda item: (0, order[item]) if found[item.path] else (1, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What hands out files, in the order in which they are collected."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            for name in reversed(QUEUES):
                if name in self.workqueue:
                    self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

    # pytest-xdist would begin with the files that have most tests: the longest have few.
    config.option.loadscopereorder = False
    return FileScheduling(config, log)
