"""Settings of moves: whether running samples may go from one engine to another, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.scheduling.move import KV_TRANSFER, RECOMPUTE
from rhyme_openrlhf.settings.options import Settings, option

AUTO = "auto"
HOST = "host"
DEVICE = "device"


@dataclass(frozen=True)
class MoveSettings(Settings):
    """A running sample goes on at another engine as if nothing had happened (RLHFSpec 6, PAT 4.3)."""

    group: ClassVar[str] = "move"
    title: ClassVar[str] = "Moves: a running sample goes on at another engine as if nothing had happened."

    enable: bool = option(
        False,
        "Keep samples apart from the engines, so that they can move, and go on elsewhere when an engine dies. Engines "
        "then schedule synchronously.",
    )
    carrier: str = option(
        AUTO,
        "How the KV cache gets to the other engine: 'kv_transfer' copies it while the sample runs on, 'recompute' "
        "computes it again; 'auto' takes what costs the sample less time, as far as that is known.",
        choices=(AUTO, KV_TRANSFER, RECOMPUTE),
    )
    memory: str = option(
        HOST,
        "Where KV blocks lie on their way within a node: in the host's shared memory, or, with 'device', in memory of "
        "the source's GPUs (CUDA IPC; takes as much there as the sample's KV cache; not tried on a GPU yet).",
        choices=(HOST, DEVICE),
    )
    timeout_s: float = option(
        30.0, "Seconds one order to an engine may take in a move; after that it is taken back.", low=0.5, high=3600
    )
    news_s: float = option(
        1.0,
        "Seconds between two looks at what each running sample has generated: what a dying engine can take with it.",
        low=0.02,
        high=60,
    )
