"""Settings of rehearsal: whether idle engines generate samples of coming prompts, only to draft from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, option


@dataclass(frozen=True)
class RehearsalSettings(Settings):
    """Idle engines generate samples of the prompts that they get next, as drafts for the real samples."""

    group: ClassVar[str] = "rehearsal"
    title: ClassVar[str] = "Rehearsal: idle engines generate samples of coming prompts, only to draft from them."

    enable: bool = option(
        False,
        "Let an engine with nothing to run generate one or two samples of each prompt that it gets next, if the prompt "
        "has no history. They serve as drafts for the prompt's real samples and count nowhere. A real request or a "
        "weight load ends them at once. They take power, and time from engines that share the processor's cores.",
        expert=True,
    )
