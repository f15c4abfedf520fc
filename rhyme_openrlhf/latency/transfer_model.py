"""Seconds to carry samples to another engine, by KV transfer or recompute, and to load weights (PAT 4.3, eq. 1 to 4).

A prefill grows with its length and with its square, so between two profiled lengths it is a power of the length. Over
the number of sequences it is linear.

Invariants: what was not measured raises NotMeasured and is never guessed; more tokens never cost less, unless they were
measured so.
"""

from __future__ import annotations

import contextlib
import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from rhyme_openrlhf.latency.curve import Curve, PowerCurve
from rhyme_openrlhf.latency.profile import Profile


class NotMeasured(ValueError):
    """The error for a figure that the profile does not have."""


class TransferModel:
    """The fitted model of one profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        by_sequences: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for point in profile.prefills:
            by_sequences[point.sequences].append((point.length, point.seconds))
        self._prefills = [(sequences, PowerCurve(points)) for sequences, points in sorted(by_sequences.items())]
        self._sequences = [sequences for sequences, _ in self._prefills]

    def prefill_seconds(self, lengths: Sequence[int]) -> float:
        """Return the prefill of these sequences: that of as many of their root-mean-square length (eq. 3 and 4)."""
        if not self._prefills:
            raise NotMeasured("the profile has no prefill: make it again with `rhyme profile`")
        if not lengths:
            return 0.0
        rms = math.sqrt(sum(map(operator.mul, lengths, lengths)) / len(lengths))
        # Only the two neighbouring numbers of sequences, or the two outermost ones, decide.
        right = min(max(bisect_right(self._sequences, len(lengths)), 1), len(self._prefills) - 1)
        around = self._prefills[max(right - 1, 0) : right + 1]
        return Curve([(sequences, curve.at(rms)) for sequences, curve in around]).at(len(lengths))

    def kv_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes that one rank sends (eq. 1, with the profile's bytes a token for grouped-query heads)."""
        return sum(lengths) * self._profile.kv_bytes_per_token

    def kv_transfer_seconds(self, lengths: Sequence[int]) -> float:
        """Return the seconds in which the KV cache of these contexts is sent to another engine (eq. 2)."""
        if not self._profile.kv_bytes_per_second:
            raise NotMeasured("the profile has no KV bandwidth: make it again with `rhyme profile`")
        return self.kv_bytes(lengths) / self._profile.kv_bytes_per_second

    def weight_load_seconds(self) -> float:
        """Return the seconds in which the engine loads a weight version."""
        if not self._profile.weight_load_seconds:
            raise NotMeasured("the profile has no weight load: make it again with `rhyme profile`")
        return self._profile.weight_load_seconds


def carrying_seconds(source: TransferModel | None, target: TransferModel | None, contexts: Sequence[int]) -> float:
    """Return the seconds to carry samples of these contexts from one layout to another, by the cheaper way (PAT 4.3).

    Ways that were not measured do not count; 0 without any.
    """
    ways = []
    if source is not None:
        with contextlib.suppress(NotMeasured):
            ways.append(source.kv_transfer_seconds(contexts))
    if target is not None:
        with contextlib.suppress(NotMeasured):
            ways.append(target.prefill_seconds(contexts))
    return min(ways, default=0.0)


def carrying_words(profile: Profile) -> tuple[str, str]:
    """Return sentences on KV transfer and weight load of a profile."""
    rate, load = profile.kv_bytes_per_second, profile.weight_load_seconds
    kv = f"{rate / 1e9:.3g} GB/s a rank, {profile.kv_bytes_per_token:,} bytes a token" if rate else "not measured"
    return f"KV transfer: {kv}", f"weight load: {f'{load:.3g} s' if load else 'not measured'}"
