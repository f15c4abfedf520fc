"""Settings of weights: what carries each trained version to the engines, and how the arrival is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, option

# Values of --weights.transport.
AUTO = "auto"
BUFFER = "buffer"
OPENRLHF = "openrlhf"


@dataclass(frozen=True)
class WeightSettings(Settings):
    """Transport of trained weights to the engines (RhymeRL, section 4.2: weight buffers)."""

    group: ClassVar[str] = "weights"
    title: ClassVar[str] = "Weight buffer: how trained weights reach the rollout engines."

    transport: str = option(
        AUTO,
        "Transport of weights: buffer, openrlhf or auto. 'buffer' writes numbered versions into one shared-memory copy"
        " a node; 'openrlhf' uses OpenRLHF's own broadcast (NCCL or CUDA IPC; gloo without a GPU). 'auto' takes "
        "OpenRLHF's own on GPUs, and the buffer without a GPU and for runs with --move.enable, --reallocation.enable, "
        "--tp_switch.enable, --histopipe.enable or --ds.lora.rank.",
        choices=(AUTO, BUFFER, OPENRLHF),
    )
    bucket_mb: int = option(
        512, "Size in MB of the pieces in which a weight version is published.", low=1, high=16384, expert=True
    )
    check_syncs: int = option(
        1,
        "First weight syncs after which engines and trained model are compared. The log-probabilities of a "
        "sequence in every engine are compared with the trained model's; the difference is recorded, and a large one "
        "is warned of. Its tokens differ from sync to sync, so that more syncs cover more of the vocabulary.",
        low=0,
    )
    timeout_s: float = option(
        600.0, "Seconds after which publishing or loading a weight version is given up.", low=1, high=86400, expert=True
    )
