"""Settings of moves and of reallocation: whether running samples go to other engines, how, and how often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from rhyme_openrlhf.settings.options import Settings, option

# How a sample's KV cache gets to another engine.
AUTO = "auto"
KV_TRANSFER: Final = "kv_transfer"
RECOMPUTE: Final = "recompute"


@dataclass(frozen=True)
class MoveSettings(Settings):
    """A running sample goes on at another engine as if nothing had happened (RLHFSpec 6, PAT 4.3)."""

    group: ClassVar[str] = "move"
    title: ClassVar[str] = "Moves: a running sample goes on at another engine as if nothing had happened."

    enable: bool = option(
        False,
        "Let running samples move between engines, and outlive a lost one. Engines then schedule synchronously.",
    )
    carrier: str = option(
        AUTO,
        "Way of the KV cache to the other engine. 'kv_transfer' copies it while the sample runs on, 'recompute' "
        "computes it again, and 'auto' takes the way that is predicted to cost the sample less time.",
        choices=(AUTO, KV_TRANSFER, RECOMPUTE),
        expert=True,
    )
    timeout_s: float = option(
        30.0,
        "Seconds one order to an engine may take in a move. After that, the move is cancelled.",
        low=0.5,
        high=3600,
        expert=True,
    )
    news_s: float = option(
        1.0,
        "Seconds between two looks at what each running sample has generated: what a dying engine can take with it.",
        low=0.02,
        high=60,
        expert=True,
    )


@dataclass(frozen=True)
class ReallocationSettings(Settings):
    """Running samples are evened out over the engines during a rollout (RLHFSpec 6)."""

    group: ClassVar[str] = "reallocation"
    title: ClassVar[str] = "Reallocation: running samples go from full engines to empty ones during a rollout."

    enable: bool = option(
        False,
        "Move running samples from full engines to empty ones. Full is an engine that runs more than throughput gains "
        "by. Needs two engines, and switches --move.enable on.",
    )
    threshold: int = option(
        0,
        "Running samples of an engine above which it gives some away and below which it takes some; 0: what raises "
        "throughput most is moved, by the latency model, corrected by what steps really take.",
        low=0,
        high=100000,
        expert=True,
    )
    # RLHFSpec 6.1 names no number. 32 steps cost a sample far more than the two that a move takes from it.
    cooldown_steps: int = option(
        32, "Decode steps from one decision to move samples to the next.", low=1, high=1000000, expert=True
    )
    status_s: float = option(
        0.5,
        "Seconds between two reports of each engine (running samples, room, speed), on which decisions are made.",
        low=0.02,
        high=60,
        expert=True,
    )
