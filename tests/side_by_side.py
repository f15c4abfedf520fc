"""Two pytest processes share the tests (`pytest -n 2`, as `scripts/test.sh` does): which may run beside which.

Engines and Ray take memory, ports and processors, and their time limits count on having them: files with such tests are
one queue, one after another, and begin first. The other process takes the remaining files, one at a time; whoever is
done helps with those.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

QUEUE = "engines and Ray"
_STARTS_THEM = re.compile(r"pytest\.mark\.(engine|e2e|ray)\b")


@functools.cache
def waits_its_turn(path: Path) -> bool:
    """Whether a test file says that it starts engines or Ray: the process that hands out tests collects none."""
    return bool(_STARTS_THEM.search(path.read_text(encoding="utf-8")))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What hands out files, in the order in which they are collected."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return QUEUE if waits_its_turn(config.rootpath / path) else path

        def _assign_work_unit(self, node: Any) -> None:
            if QUEUE in self.workqueue:
                self.workqueue.move_to_end(QUEUE, last=False)
            super()._assign_work_unit(node)

    # pytest-xdist would begin with the files that have most tests: the longest have few.
    config.option.loadscopereorder = False
    return FileScheduling(config, log)
