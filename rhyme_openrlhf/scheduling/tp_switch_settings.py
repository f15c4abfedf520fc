"""Settings of adaptive tensor parallelism: whether a node has a second layout for the tail, and when it goes there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.options import Settings, option

BY_HISTORY = "history"
BY_MAXIMUM = "maximum"


@dataclass(frozen=True)
class TpSwitchSettings(Settings):
    """A rollout's last samples go on at engines with more tensor parallelism, on the same devices (PAT)."""

    group: ClassVar[str] = "tp_switch"
    title: ClassVar[str] = (
        "Adaptive tensor parallelism: the last samples of a rollout go on at engines of more devices each."
    )

    enable: bool = option(
        False,
        "Start a second set of engines on the same devices, each over --tp_switch.size of them, and move a node's "
        "unfinished samples there when the rest of the rollout is then predicted to be shorter; switches --move.enable "
        "on. Without GPUs only, so far.",
    )
    size: int = option(2, "Devices of each engine of the tail layout (its tensor-parallel size).", low=2, high=64)
    rule: str = option(
        BY_HISTORY,
        "How much longer samples are taken to be: 'history' by what their prompts were answered before, 'maximum' as "
        "if each ran to --rollout.max_new_tokens (PAT's own rule).",
        choices=(BY_HISTORY, BY_MAXIMUM),
    )
    samples: int = option(
        0,
        "Switch when a node has so many unfinished samples left, or fewer, whatever is predicted; 0: by prediction.",
        low=0,
        high=100000,
    )
    kv_cache_mb: int = option(
        0,
        "KV cache of each rank of a tail engine in MB; 0: so much that its engine has what one of the others has.",
        low=0,
        high=1048576,
    )
    profile: str = option(
        "auto",
        "Profile of the tail layout made by `rhyme profile` with --vllm.tensor_parallel_size as --tp_switch.size; "
        "'auto': the one that is kept for it, or else a quick one that is measured at the start.",
    )
    status_s: float = option(0.25, "Seconds between two looks at whether to switch.", low=0.02, high=60)
