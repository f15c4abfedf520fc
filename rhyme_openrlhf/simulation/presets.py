"""Workloads with the length distributions that the papers print. What they do not print is marked as assumed.

None prints how lengths vary between the samples of a prompt: all take the defaults, which follow RhymeRL's table 2.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from rhyme_openrlhf.simulation.workload import Shape


def _through(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """(median, sigma) of the log-normal distribution with these two (length, share of responses up to it)."""
    (low, low_share), (high, high_share) = first, second
    low_z, high_z = NormalDist().inv_cdf(low_share), NormalDist().inv_cdf(high_share)
    sigma = (math.log(high) - math.log(low)) / (high_z - low_z)
    return math.exp(math.log(low) - low_z * sigma), sigma


# PAT, section 2.3: 10.85 % of the responses are longer than 8K tokens, 2.18 % longer than 16K.
_PAT = _through((8192, 1 - 0.1085), (16384, 1 - 0.0218))
# RLHFSpec, section 3.1: median 378 tokens, 95th percentile 1373; section 7.1: at most 2048 are generated.
_LMSYS = _through((378, 0.5), (1373, 0.95))

PRESETS = {
    shape.name: shape
    for shape in (
        Shape(
            "pat-deepscaler",
            "PAT 2.3 (LLaMA3.1-8B on DeepScaleR: 10.85 % above 8K, 2.18 % above 16K)",
            *_PAT,
            longest=16384,
        ),
        Shape(
            "rlhfspec-lmsys",
            "RLHFSpec 3.1 and 7.1 (LMSYS-Chat-1M: median 378, 95th percentile 1373, at most 2048)",
            *_LMSYS,
            longest=2048,
        ),
        # RhymeRL, figure 3a: the mean grows from 1K to 10K in 320 steps; section 7: at most 16K. The spread is not
        # printed and is taken from PAT's.
        Shape(
            "rhymerl-math",
            "RhymeRL figure 3a and table 2 (mean 1K growing to 10K in 320 steps, at most 16K); spread assumed as PAT's",
            1000 / math.exp(_PAT[1] ** 2 / 2),
            _PAT[1],
            longest=16384,
            growth=1.08,
        ),
    )
}
