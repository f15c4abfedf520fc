"""OpenRLHF's dynamic filtering in the streaming pipeline: which prompt groups teach nothing, and are not trained on.

The rule is that of OpenRLHF 0.11.2 (`samples_generator.py`, `_generate_vllm`): a prompt group's mean score must lie
within the range, both ends excluded; where a sample has no score nothing is filtered.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

ScoreRange = tuple[float, float]


def score_range(args: SimpleNamespace) -> ScoreRange | None:
    """What a prompt group's mean score must lie within; None where nothing is filtered."""
    if not args.algo.dynamic_filtering_enable:
        return None
    low, high = args.algo.dynamic_filtering_range
    return float(low), float(high)


def teaches_nothing(samples: Sequence[Any], within: ScoreRange | None) -> bool:
    """Whether the prompt group of these samples (OpenRLHF's experiences) is to be filtered out."""
    if within is None or any(sample.scores is None for sample in samples):
        return False
    low, high = within
    return not low < statistics.fmean(sample.scores[0].item() for sample in samples) < high
