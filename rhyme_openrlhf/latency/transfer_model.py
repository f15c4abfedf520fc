"""Seconds to carry samples to another engine, both ways there are, and to load weights (PAT 4.3, equations 1 to 4).

A prefill grows with its length and with its square, so between two profiled lengths it is a power of the length; over
the number of sequences it is linear. Invariants: what was not measured raises NotMeasured and is never guessed; more
tokens never cost less, as far as was not measured otherwise.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence

from rhyme_openrlhf.latency.curve import Curve, PowerCurve
from rhyme_openrlhf.latency.profile import Profile


class NotMeasured(ValueError):
    """The profile has no measurement of this."""


class TransferModel:
    """The fitted model of one profile: of the engine that receives."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        by_sequences: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for point in profile.prefills:
            by_sequences[point.sequences].append((point.length, point.seconds))
        self._prefills = [(sequences, PowerCurve(points)) for sequences, points in sorted(by_sequences.items())]
        self._sequences = [sequences for sequences, _ in self._prefills]

    def prefill_seconds(self, lengths: Sequence[int]) -> float:
        """Prefill of sequences of these lengths together: as of as many of their root-mean-square length (eq. 3, 4)."""
        if not self._prefills:
            raise NotMeasured("the profile has no prefill: make it again with `rhyme profile`")
        if not lengths:
            return 0.0
        rms = math.sqrt(sum(map(operator.mul, lengths, lengths)) / len(lengths))
        # The two numbers that this one lies between, or the outermost on its side: the curve needs no others.
        right = min(max(bisect_right(self._sequences, len(lengths)), 1), len(self._prefills) - 1)
        around = self._prefills[max(right - 1, 0) : right + 1]
        return Curve([(sequences, curve.at(rms)) for sequences, curve in around]).at(len(lengths))

    def kv_bytes(self, lengths: Sequence[int]) -> int:
        """Bytes that one rank sends (eq. 1, with the profile's own bytes per token: grouped-query heads are right)."""
        return sum(lengths) * self._profile.kv_bytes_per_token

    def kv_transfer_seconds(self, lengths: Sequence[int]) -> float:
        """The KV cache of these contexts to another engine (eq. 2)."""
        if not self._profile.kv_bytes_per_second:
            raise NotMeasured("the profile has no KV bandwidth: make it again with `rhyme profile`")
        return self.kv_bytes(lengths) / self._profile.kv_bytes_per_second

    def weight_load_seconds(self) -> float:
        """A new weight version into the engine."""
        if not self._profile.weight_load_seconds:
            raise NotMeasured("the profile has no weight load: make it again with `rhyme profile`")
        return self._profile.weight_load_seconds


def carrying_words(profile: Profile) -> tuple[str, str]:
    """KV transfer and weight load of a profile, as a person reads them."""
    rate, load = profile.kv_bytes_per_second, profile.weight_load_seconds
    kv = f"{rate / 1e9:.3g} GB/s a rank, {profile.kv_bytes_per_token:,} bytes a token" if rate else "not measured"
    return f"KV transfer: {kv}", f"weight load: {f'{load:.3g} s' if load else 'not measured'}"
