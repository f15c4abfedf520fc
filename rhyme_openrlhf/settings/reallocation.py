"""Settings of reallocation: whether samples go from full engines to empty ones, and how often that is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, option


@dataclass(frozen=True)
class ReallocationSettings(Settings):
    """Running samples are evened out over the engines during a rollout (RLHFSpec 6)."""

    group: ClassVar[str] = "reallocation"
    title: ClassVar[str] = "Reallocation: running samples go from full engines to empty ones during a rollout."

    enable: bool = option(
        False,
        "Move running samples from engines that run more than throughput gains by to engines that run fewer; needs "
        "two engines, and switches --move.enable on.",
    )
    threshold: int = option(
        0,
        "Running samples of an engine above which it gives some away and below which it takes some; 0: the knee of "
        "throughput over running samples, from the latency model, corrected by what steps really take.",
        low=0,
        high=100000,
    )
    # RLHFSpec 6.1 names no number. 32 steps cost a sample far more than the two that a move takes from it.
    cooldown_steps: int = option(32, "Decode steps from one decision to move samples to the next.", low=1, high=1000000)
    status_s: float = option(
        0.5,
        "Seconds between two reports of each engine (running samples, room, speed), on which decisions are made.",
        low=0.02,
        high=60,
    )
