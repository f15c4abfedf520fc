"""Settings of a run's life: where it writes, what the terminal shows, and how long each stage may take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, option


@dataclass(frozen=True)
class RunSettings(Settings):
    """The run record and what the terminal shows."""

    group: ClassVar[str] = "run"
    title: ClassVar[str] = "Run record: the files that a run writes, and its output on the terminal."

    dir: str = option("", "Run directory, new or empty; none: runs/<date>-<time>-<name>.", kind="output")
    name: str = option("run", "Short name of the run, used in its directory's name.", kind="plain")
    reproducible: bool = option(
        False,
        "Two runs with one --train.seed on one machine sample the same tokens. Prompt order and every request are "
        "seeded (OpenRLHF seeds neither), samples are ordered by prompt, and each prompt's history is waited for.",
    )
    progress: str = option(
        "auto",
        "'bars' for a terminal, 'lines' for a plain log, 'off'; 'auto' picks by whether the output is a terminal.",
        choices=("auto", "bars", "lines", "off"),
        expert=True,
    )
    worker_logs: bool = option(
        False, "Print the Ray workers' own output on the terminal too (it is always in logs/).", expert=True
    )


@dataclass(frozen=True)
class LimitSettings(Settings):
    """Time limits after which a run is ended in order instead of hanging."""

    group: ClassVar[str] = "limits"
    title: ClassVar[str] = "Limits: how long a stage may go without progress before the run is ended, saying why."

    reward_s: float = option(
        600.0,
        "Seconds a reward function may take for one sample. Then it is called once more. A reward server has the limit "
        "of OpenRLHF: five times 180 seconds.",
        low=0.1,
        high=86400,
    )
    rollout_s: float = option(
        # Longer than a reward may take, because the last samples of a rollout may all wait for theirs.
        1800.0,
        "Seconds a rollout may go on without a new token or finished sample. The limit is that of evaluations, too.",
        low=1,
        high=86400,
    )
    stage_s: float = option(
        3600.0,
        "Seconds that any other stage may take, from start-up to checkpoint. The others are experience, training "
        "and weight sync.",
        low=1,
        high=604800,
    )
    # Schedulers (Slurm, Kubernetes, Ray) kill 30 s after SIGTERM; the other half is for the end of the run.
    sigterm_s: float = option(
        15.0,
        "Seconds from SIGTERM for completing the step and a checkpoint. After that the run ends as it is.",
        low=0,
        high=86400,
    )
