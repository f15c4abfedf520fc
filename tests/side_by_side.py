"""Two pytest processes share the tests (`pytest -n 2`, as `scripts/test.sh` does): which may run beside which.

Ray takes memory and processors, and finds what another Ray left running; engines take memory. So files that start a Ray
are one queue, one after another, those with engines of this process are a second one, and both begin first. The
remaining files, one at a time, are for whoever is done.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

# In this order; a file belongs to the first one of whose marks it has one.
QUEUES = {"Ray": re.compile(r"pytest\.mark\.(e2e|ray)\b"), "engines": re.compile(r"pytest\.mark\.engine\b")}


@functools.cache
def queue_of(path: Path) -> str:
    """The queue of a test file, "" for none. By its text: the process that hands out tests collects none."""
    text = path.read_text(encoding="utf-8")
    return next((name for name, mark in QUEUES.items() if mark.search(text)), "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What hands out files, in the order in which they are collected."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return queue_of(config.rootpath / path) or path

        def _assign_work_unit(self, node: Any) -> None:
            for name in reversed(QUEUES):
                if name in self.workqueue:
                    self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

    # pytest-xdist would begin with the files that have most tests: the longest have few.
    config.option.loadscopereorder = False
    return FileScheduling(config, log)
