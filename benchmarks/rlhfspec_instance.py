"""An instance like RLHFSpec's, as a profile: what its section 3.3 prints of throughput by running samples. Derived."""

from __future__ import annotations

from rhyme_openrlhf.latency.profile import Profile, StepPoint, Subject

# RLHFSpec 3.3: tokens a second of one instance, by number of samples; linear between them.
PAPERS_TOKENS_PER_SECOND = {1: 103.0, 6: 765.0, 19: 1415.0, 24: 1453.0}


def papers_profile(slower: float) -> Profile:
    """Return the step times behind RLHFSpec 3.3's throughputs, `slower` times as long."""
    steps = tuple(
        StepPoint(count, context, 0, slower * count / rate, 0.0, 1)
        for count, rate in PAPERS_TOKENS_PER_SECOND.items()
        for context in (0, 100_000)
    )
    return Profile(Subject("RLHFSpec 3.3", f"its instance, {slower:g} times slower", "-", 1), "derived", steps)
