"""Which engine a prompt goes to: the one with the least predicted work (longest prompts first).

Predicted work is in tokens: what the prompt's samples were long last time. Without any history all prompts count the
same, and the result is OpenRLHF's own order: each next prompt to the engine with the fewest.

Invariants: each prompt goes to one engine; with equal work the numbers of prompts on the engines differ by at most one;
no engine ends with more than 4/3 of the work that the best distribution leaves on its fullest engine (Graham 1969),
if none had work before.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence


def by_predicted_work(lengths: Sequence[Sequence[int]], unfinished: Sequence[int], samples: int) -> list[int] | None:
    """Return the engine of each prompt, which is answered `samples` times; None without any history.

    `lengths`: response lengths of each prompt's last rollout (none: never seen); `unfinished`: samples that each engine
    still has, which count as samples of the mean length.
    """
    means = [statistics.fmean(of_prompt) if of_prompt else None for of_prompt in lengths]
    known = [mean for mean in means if mean is not None]
    if not known:
        return None
    each = statistics.fmean(known)
    return assign([None if mean is None else samples * mean for mean in means], [count * each for count in unfinished])


def assign(lengths: Sequence[float | None], loads: Sequence[float]) -> list[int]:
    """The engine (place in `loads`) of each prompt.

    `lengths`: predicted tokens of a prompt, None if never seen (counts as the median of the others); `loads`: predicted
    tokens each engine still has to generate. Raises ValueError without engines.
    """
    if not loads:
        raise ValueError("there is no engine to send prompts to")
    known = [length for length in lengths if length is not None]
    middle = statistics.median(known) if known else 1.0
    work = [middle if length is None else float(length) for length in lengths]
    # The number of prompts given decides between equal loads, then the engine's place.
    heap = [(float(load), 0, engine) for engine, load in enumerate(loads)]
    heapq.heapify(heap)
    chosen = [0] * len(work)
    for prompt in sorted(range(len(work)), key=lambda place: -work[place]):
        load, count, engine = heap[0]
        chosen[prompt] = engine
        heapq.heapreplace(heap, (load + work[prompt], count + 1, engine))
    return chosen
