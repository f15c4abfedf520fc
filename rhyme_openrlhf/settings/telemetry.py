"""Settings of telemetry: which responses and machine figures a run keeps beside its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, SettingsError, option


@dataclass(frozen=True)
class TelemetrySettings(Settings):
    """Recording beyond the events that cost nothing."""

    group: ClassVar[str] = "telemetry"
    title: ClassVar[str] = "Telemetry: responses and machine figures that a run keeps for the dashboard."

    sample_groups: int = option(
        2,
        "Prompts of a step whose responses are kept, token by token. Each step keeps other prompts. Reward, advantage, "
        "length and age are kept of all samples. 0: nothing is kept.",
        low=0,
        high=64,
    )
    samples_mb: int = option(
        64,
        "Most MB of kept responses and tables of samples in the run directory; of more, those of the oldest steps are "
        "deleted.",
        low=1,
        expert=True,
    )
    system_s: float = option(
        5.0,
        "Seconds between two looks at each node's processors, memory, disk and GPUs. 0: none.",
        low=0,
        high=3600,
        expert=True,
    )

    def check(self) -> None:
        if 0 < self.system_s < 1:
            raise SettingsError(f"--telemetry.system_s must be 0, or at least 1, got {self.system_s:g}")
