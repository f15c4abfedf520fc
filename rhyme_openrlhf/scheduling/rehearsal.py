"""Rehearsal: when an idle engine generates samples only to draft from them, and of which prompts. Pure.

An engine rehearses the prompts that it gets next, each once, and then each a second time while there is time left. By
replay of recorded runs, one such sample doubles the tokens a decode step of the first epoch, and a second one adds an
eighth; more would add little.

Invariants: nothing is rehearsed while a real sample runs or weights load. No prompt is rehearsed more than
SAMPLES_EACH times, none a second time before all others have begun, and never more at once than the engine runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Samples of each prompt that are generated to draft from.
SAMPLES_EACH = 2


def to_rehearse(
    coming: Sequence[str], begun: Mapping[str, int], under_way: int, most_running: int, real: int, is_open: bool
) -> list[str]:
    """Return the prompts of which a rehearsal begins now, one entry for each sample.

    `coming`: the prompts that the engine gets next, first ones first; `begun`: rehearsals of each so far; `under_way`:
    rehearsals that run now; `most_running`: samples that the engine runs at once; `real`: real samples there;
    `is_open`: no weights load.
    """
    if real or not is_open:
        return []
    found = [prompt for turn in range(SAMPLES_EACH) for prompt in coming if begun.get(prompt, 0) <= turn]
    return found[: max(most_running - under_way, 0)]
