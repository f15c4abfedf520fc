"""RLHFSpec 6.1, equation 6, by its text: which engines exchange samples, and how many.

Maximize the samples that move in all. An engine above the threshold gives to one below it; each engine takes part once.
A source keeps at least the threshold, a destination gets at most up to it.
"""

from __future__ import annotations

import functools
import random

import pytest

from rhyme_openrlhf.scheduling.reallocation import EngineLoad, Reallocation, by_threshold

PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
CASES = 300
FREE = 10**9


def most_moved(counts: list[int], threshold: int) -> int:
    """The largest sum of all pairings, by trying each destination or none for each source."""
    sources = [count - threshold for count in counts if count > threshold]
    room = tuple(threshold - count for count in counts if count < threshold)

    @functools.cache
    def best(source: int, left: tuple[int, ...]) -> int:
        if source == len(sources):
            return 0
        without = best(source + 1, left)
        pairs = (min(sources[source], of) + best(source + 1, left[:n] + left[n + 1 :]) for n, of in enumerate(left))
        return max(without, *pairs) if left else without

    return best(0, room)


def loads(draw: random.Random, counts: list[int], limited: bool) -> list[EngineLoad]:
    found = []
    for engine, count in enumerate(counts):
        running = tuple((draw.randint(10, 500), draw.uniform(0, 3), 100 * engine + n) for n in range(count))
        free = draw.randint(0, 1500) if limited else FREE
        found.append(EngineLoad(engine, running, free, draw.randint(0, 6) if limited else None))
    return found


def check(engines: list[EngineLoad], moves: list[Reallocation], threshold: int) -> None:
    """The constraints of equation 6, and that the shortest samples go."""
    part = [engine for move in moves for engine in (move.source, move.destination)]
    assert len(set(part)) == len(part)
    for move in moves:
        source, target = engines[move.source], engines[move.destination]
        contexts = {sample: context for context, _, sample in source.running}
        assert move.samples and set(move.samples) <= set(contexts)
        assert len(source.running) - len(move.samples) >= threshold
        assert len(target.running) + len(move.samples) <= threshold
        assert sum(contexts[sample] for sample in move.samples) <= target.free_tokens
        assert target.free_seats is None or len(move.samples) <= target.free_seats
        longest = max(contexts[sample] for sample in move.samples)
        assert sum(context < longest for context in contexts.values()) < len(move.samples)


@pytest.mark.parametrize("part", PARTS)
def test_no_pairing_moves_more(part: int) -> None:
    draw = random.Random(part)
    for _ in range(CASES):
        counts = [draw.randint(0, 20) for _ in range(draw.randint(2, 8))]
        engines, threshold = loads(draw, counts, limited=False), draw.randint(1, 16)
        moves = by_threshold(engines, threshold)
        check(engines, moves, threshold)
        assert sum(len(move.samples) for move in moves) == most_moved(counts, threshold)


@pytest.mark.parametrize("part", PARTS)
def test_with_limited_room_the_constraints_hold(part: int) -> None:
    """A pair moves as many of the shortest samples as fit, never more in all than the best pairing."""
    draw = random.Random(100 + part)
    for _ in range(CASES):
        counts = [draw.randint(0, 20) for _ in range(draw.randint(2, 8))]
        engines, threshold = loads(draw, counts, limited=True), draw.randint(1, 16)
        moves = by_threshold(engines, threshold)
        check(engines, moves, threshold)
        assert sum(len(move.samples) for move in moves) <= most_moved(counts, threshold)
        for move in moves:
            source, target = engines[move.source], engines[move.destination]
            left = sorted(context for context, _, sample in source.running if sample not in move.samples)
            taken = sum(context for context, _, sample in source.running if sample in move.samples)
            assert (
                len(source.running) - len(move.samples) == threshold
                or len(target.running) + len(move.samples) == threshold
                or len(move.samples) == target.free_seats
                or taken + left[0] > target.free_tokens
            )
