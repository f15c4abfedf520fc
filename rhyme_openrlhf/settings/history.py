"""Settings of the history workers: who keeps what was generated before, and with how much memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, option

# Words of --history.earlier.
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class HistorySettings(Settings):
    """History workers (RhymeRL, section 4.2): who keeps what was generated before."""

    group: ClassVar[str] = "history"
    title: ClassVar[str] = "History workers: Ray actors on CPU that keep and index each prompt's last responses."

    workers: int = option(
        0,
        "History workers in the cluster; each owns a share of the prompts. 0: one on each node.",
        low=0,
        high=1024,
    )
    cpus_per_worker: float = option(
        0.5,
        "CPUs for each history worker: what Ray reserves, and its limit where it may make a cgroup (0: neither). It "
        "works with one thread: for more than one CPU take more workers.",
        low=0,
        high=64,
        expert=True,
    )
    memory_gb: float = option(
        16.0,
        "GB of each node's memory for draft indexes and their responses. An index takes 15 bytes a token, a response "
        "about 1; what is over is compressed to the disk and brought back when its prompt comes.",
        low=0.001,
        high=100000,
    )
    spill_dir: str = option(
        "",
        "Directory on each node for draft indexes beyond --history.memory_gb. If not given: in the run directory, and "
        "where there are several nodes in each one's temporary directory (TMPDIR).",
        kind="output",
        expert=True,
    )
    # RhymeRL keeps 1. With 2, three recorded runs of the embedded task give 7 to 30 % more tokens per decode step from
    # the third epoch on, for twice the memory.
    rollouts: int = option(
        2,
        "Rollouts of each prompt that its draft index covers, the last ones: each costs the memory of its responses.",
        low=1,
        high=8,
        expert=True,
    )
    earlier: str = option(
        AUTO,
        "Earlier runs whose responses to the same prompts are drafted from. Run directories, checkpoints or stores, "
        "with commas between them; 'auto': the newest runs beside this one, and --history.store; 'none'. They need the "
        "same tokenizer, not the same model. A reproducible run takes 'auto' as 'none' for runs beside it. A control "
        "plane takes uids of its runs, too.",
        kind="runs",
    )
    store: str = option(
        "",
        "Directory where runs leave their responses for other runs, and see those of others while they go on. On a "
        "cluster it must be on a file system that all nodes share. If not given: in the run directory. A run leaves at "
        "most --history.memory_gb a node; only its user can read them. The 20 newest runs of each tokenizer stay.",
        kind="output",
        expert=True,
    )
    fetch_timeout_s: float = option(
        10.0,
        "Seconds an engine waits for a prompt's draft index, while it already generates; after that the prompt is "
        "generated without drafts.",
        low=0.1,
        high=3600,
        expert=True,
    )

    def workers_on(self, nodes: int) -> int:
        """Return the number of history workers in a cluster of this number of nodes."""
        return self.workers or nodes
