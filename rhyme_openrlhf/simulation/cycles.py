"""Python's search for garbage in cycles, left out while a simulation runs.

A run's samples, engines and events are freed as soon as nobody has them: none of what it drops is in a cycle. But each
search goes through all of a workload's prompts, and takes a tenth of the run's time.

Invariant: afterwards the search is on again if it was before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def not_searched() -> Iterator[None]:
    """Until it is left."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
