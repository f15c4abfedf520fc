"""Which points a profile measures: few, where they tell most (PAT 4.2's sparse sampling; RLHFSpec 5.2's draft term).

Invariants: no point needs more KV cache than there is (B x L <= tokens); contexts are denser where they are short,
since decoding is less linear there; draft counts end on the stairs to which the engine pads, so that the fitted
staircase has its steps where the engine's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """What is asked for, before what fits: samples, tokens of context each, draft tokens each; prefills' sequences."""

    running: tuple[int, ...]
    contexts: tuple[int, ...]
    drafts: tuple[int, ...]
    sequences: tuple[int, ...]


# Samples in powers of two from one on: step times bend at tile sizes, which are powers of two. Contexts as PAT's:
# denser below 512. Drafts: the paper's window runs from 2 to 32.
FULL = Grid(
    running=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    contexts=(16, 64, 128, 256, 512, 1024, 4096, 16384, 65536),
    drafts=(1, 3, 7, 15, 31),
    sequences=(1, 2, 4, 8, 16, 32),
)
# As few as show how time grows with each of the three; of prefill what a sample costs that is recomputed elsewhere.
QUICK = Grid(running=(1, 4, 16, 64, 256), contexts=(32, 256, 1024), drafts=(1, 3, 7, 15), sequences=(1,))


@dataclass(frozen=True)
class StepShape:
    """A decode step to measure: samples, tokens of context each, draft tokens each."""

    running: int
    context_each: int
    drafts_each: int


@dataclass(frozen=True)
class PrefillShape:
    """A prefill to measure: sequences, tokens each."""

    sequences: int
    length: int


@dataclass(frozen=True)
class Limits:
    """What the engine can hold: samples at once, tokens of a sequence, tokens of KV cache, tokens computed a step, and
    draft tokens of a sample, of which vLLM dies if there are more.

    `verified_rows`: rows of a step that verifies drafts, None if no memory bounds them.
    """

    running: int
    length: int
    kv_cache_tokens: int
    step_tokens: int
    drafts_each: int
    verified_rows: int | None = None


def step_shapes(limits: Limits, steps: int, grid: Grid = FULL) -> list[StepShape]:
    """The decode steps to measure, those of few samples first. `steps`: decode steps measured at each point.

    A sample grows while it is measured: by up to its drafts and one a step.
    """
    shapes = []
    for running in _up_to(grid.running, limits.running):
        for drafts in (0, *_drafts_up_to(grid.drafts, limits.drafts_each)):
            # A step that is filled to the brim leaves no token for the last samples to come in.
            rows = running * (1 + drafts)
            if rows >= limits.step_tokens or (drafts and limits.verified_rows and rows > limits.verified_rows):
                continue
            for context in _up_to(grid.contexts, limits.length):
                room = context + steps * (1 + drafts) + 1
                if room <= limits.length and running * room <= limits.kv_cache_tokens:
                    shapes.append(StepShape(running, context, drafts))
    return shapes


def prefill_shapes(limits: Limits, grid: Grid = FULL) -> list[PrefillShape]:
    """The prefills to measure."""
    return [
        PrefillShape(sequences, length)
        for sequences in _up_to(grid.sequences, limits.running)
        for length in _up_to(grid.contexts, limits.length - 1)
        if sequences * (length + 1) <= limits.kv_cache_tokens
    ]


def _drafts_up_to(values: Sequence[int], most: int) -> list[int]:
    """As `_up_to`, and `most` in place of the last where that is near: a drafter that proposes `most` tokens for every
    sample has steps of that size all the time."""
    found = _up_to(values, most)
    return [*found[:-1], most] if found and most < values[-1] else found


def _up_to(values: Sequence[int], most: int) -> list[int]:
    """Those of `values` up to `most`, and `most` itself where it lies well beyond the last of them."""
    found = [value for value in values if value <= most]
    if found and found[-1] * 1.5 < most < values[-1]:
        found.append(most)
    return found
