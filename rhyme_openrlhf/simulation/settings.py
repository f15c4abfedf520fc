"""Settings of a simulation: the cluster, the features in use, the acceptance of drafts, the slowness of engines.

Invariant: settings are checked when made; the message names the option and what is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rhyme_openrlhf.scheduling.outliers import ALPHA, BETA_FLOOR
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.settings.moves import ReallocationSettings

# What a run uses if nobody says otherwise.
HISTOPIPE, REALLOCATION, HISTOSPEC = HistoPipeSettings(), ReallocationSettings(), HistoSpecSettings()

# Most devices of one node.
MOST_DEVICES = 1024

Trainer = Literal["sync", "async", "pipeline"]
SpeculationKind = Literal["off", "window", "budget", "measured"]
Switching = Literal["off", "maximum", "history"]


def _check(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"--{name} must be from {low:g} to {high:g}, got {value:g}")


@dataclass(frozen=True)
class Cluster:
    """Rollout devices and the trainer.

    `running`: samples that an engine runs at once (vLLM's max_num_seqs); `step_tokens`: its max_num_batched_tokens;
    `trainer_tokens_per_second`: response tokens trained per second; `publish_seconds`: from trained weights to their
    being ready on every node; `switch_seconds`: of a TP switch beside moving the samples (0: resident engines);
    `lookup_seconds`: of looking drafts up, in every decode step with speculation: no profile has it.
    """

    nodes: int = 1
    devices: int = 8
    tensor_parallel: int = 1
    running: int = 256
    step_tokens: int = 8192
    trainer_tokens_per_second: float = 50_000.0
    publish_seconds: float = 0.0
    switch_seconds: float = 0.0
    lookup_seconds: float = 0.0

    def __post_init__(self) -> None:
        _check("nodes", self.nodes, 1, 65536)
        _check("devices", self.devices, 1, MOST_DEVICES)
        _check("tp", self.tensor_parallel, 1, self.devices)
        _check("running", self.running, 1, 65536)
        _check("step-tokens", self.step_tokens, 1, 1 << 24)
        _check("trainer-tokens-per-second", self.trainer_tokens_per_second, 1e-3, 1e12)
        _check("publish-seconds", self.publish_seconds, 0, 86400)
        _check("switch-seconds", self.switch_seconds, 0, 86400)
        _check("lookup-seconds", self.lookup_seconds, 0, 60)
        if self.devices % self.tensor_parallel:
            raise ValueError(f"--tp {self.tensor_parallel} does not divide the {self.devices} devices of a node")

    @property
    def engines(self) -> int:
        return self.nodes * self.devices // self.tensor_parallel


@dataclass(frozen=True)
class Acceptance:
    """`coverage`: share of decode steps in which the history has a draft; `probability`: that a draft token is accepted
    if those before it were. Both 0 to 1."""

    coverage: float
    probability: float

    def __post_init__(self) -> None:
        if not (0 <= self.coverage <= 1 and 0 <= self.probability <= 1):
            raise ValueError(f"coverage and probability lie between 0 and 1, got {self.coverage}, {self.probability}")


@dataclass(frozen=True)
class Conditions:
    """Conditions of one step. `slowness`: seconds of engine steps by those of the profile; `around`: seconds of a
    stage in which an engine waits for its first requests or its last answers are handed over."""

    slowness: float = 1.0
    around: float = 0.0


AS_PROFILED = Conditions()


@dataclass(frozen=True)
class Features:
    """The features in use.

    `trainer`: OpenRLHF's synchronous or asynchronous one, or the streaming pipeline (HistoPipe's tier 1). `two_tier`:
    shares of engines by figure 12. `outliers`: moved within the step, with `defer` to the next one too. `dispatch`:
    prompts by predicted work. `interval`: seconds between two reports of engines for reallocation. `window_start` and
    `window_max`: draft tokens of a window; a fixed number if equal. `speculation` "measured": as in the run that is
    replayed. `rank_groups`: 0 for the usual number. `as_placed`: prompts go to the engines that they went to in the run
    that is replayed.
    """

    trainer: Trainer = "async"
    rank_groups: int = HISTOPIPE.rank_groups
    two_tier: bool = False
    outliers: bool = False
    defer: bool = False
    alpha: float = ALPHA
    beta_floor: float = BETA_FLOOR
    dispatch: bool = False
    as_placed: bool = False
    reallocation: bool = False
    cooldown: int = REALLOCATION.cooldown_steps
    threshold: int = REALLOCATION.threshold
    switching: Switching = "off"
    speculation: SpeculationKind = "off"
    window_start: int = HISTOSPEC.window_start
    window_max: int = HISTOSPEC.window_max
    first_acceptance: Acceptance = Acceptance(0.3, 0.65)
    last_acceptance: Acceptance = Acceptance(0.7, 0.79)
    acceptance_epochs: int = 10
    interval: float = 5.0

    def acceptance(self, epoch: int) -> Acceptance:
        """Return the acceptance of drafts in an epoch from the second on: it grows to the last one in even steps."""
        first, last = self.first_acceptance, self.last_acceptance
        way = min((epoch - 2) / max(self.acceptance_epochs - 1, 1), 1.0)
        return Acceptance(
            first.coverage + way * (last.coverage - first.coverage),
            first.probability + way * (last.probability - first.probability),
        )

    def __post_init__(self) -> None:
        _check("rank-groups", self.rank_groups, 0, 65536)
        _check("alpha", self.alpha, 0, 1)
        _check("beta", self.beta_floor, 1, 100)
        _check("cooldown", self.cooldown, 1, 1 << 31)
        _check("threshold", self.threshold, 0, 65536)
        _check("window-max", self.window_max, 2, 128)
        _check("interval", self.interval, 1e-3, 86400)
        _check("acceptance-epochs", self.acceptance_epochs, 1, 100_000)
        if self.defer and not self.outliers:
            raise ValueError("deferring is of outliers: add the feature 'outliers'")
        if self.trainer != "pipeline" and (self.two_tier or self.outliers):
            raise ValueError("two-tier shares and outliers are of the streaming pipeline: add the feature 'pipeline'")
