"""Settings of speculation: where drafts come from, and how long they may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, SettingsError, option

# vLLM 0.29 refuses more draft tokens than this per request and step (config/speculative.py).
VLLM_MAX_DRAFT_TOKENS = 128

HISTORY, NGRAM, DRAFT_MODEL, EAGLE3 = "history", "ngram", "draft_model", "eagle3"
# History, and a model where history has nothing better.
BOTH = tuple(f"{HISTORY}+{method}" for method in (DRAFT_MODEL, EAGLE3))
SOURCES = (HISTORY, NGRAM, DRAFT_MODEL, EAGLE3, *BOTH)
# vLLM's methods that load a model beside the policy.
WITH_MODEL = (DRAFT_MODEL, EAGLE3)
# vLLM's model runners, and the choice that cli/preflight_runner.py makes of them.
AUTO = "auto"
V1, V2_ASYNC = "v1", "v2-async"
# What proposes in vLLM's worker; other sources propose in the scheduler.
VLLM_METHODS = (NGRAM, *WITH_MODEL)


@dataclass(frozen=True)
class HistoSpecSettings(Settings):
    """Speculation from history (RhymeRL, sections 5.2 and 5.4)."""

    group: ClassVar[str] = "histospec"
    title: ClassVar[str] = "Draft tokens from what the same prompt was answered before; never changes what is sampled."

    enable: bool = option(True, "Speculate with drafts from each prompt's earlier responses.")
    window_start: int = option(
        2, "Draft tokens that a sample starts with, and gets after a rejection.", low=1, high=128
    )
    window_step: int = option(
        2, "Draft tokens by which a sample's window grows after a whole acceptance.", low=0, high=128
    )
    window_max: int = option(
        32,
        "Most draft tokens a sample may get in one decode step.",
        low=1,
        high=VLLM_MAX_DRAFT_TOKENS,
    )
    # By replay of recorded runs of the embedded task: a fifth fewer decode steps a sample, at equal acceptance.
    extend_confidence: float = option(
        0.7,
        "History drafts pass their window while right with this probability. The probability is estimated; 1: never.",
        low=0.01,
        high=1,
    )
    stop_confidence: float = option(
        0.5,
        "History drafts stop below this probability of being right. They have at least one token. 0: never.",
        low=0,
        high=1,
    )
    # RhymeRL looks up 7 down to 3. In replays of recorded runs of the embedded task, 16 give 5 to 7 % more tokens a
    # step than 7. With 2 instead of 3, a tenth of the decode steps fall away. A match too short to mean much costs
    # little, because its draft is short (stop_confidence).
    prefix_max: int = option(16, "Last tokens of a sample that are first looked up in the history.", low=1, high=64)
    prefix_min: int = option(2, "Shortest match that still drafts: the lookup goes down to this.", low=1, high=64)
    siblings: bool = option(
        True,
        "Also draft from the other samples of the same prompt on the engine. They may run or be finished. Not in "
        "reproducible runs: how far a sibling is depends on timing.",
    )
    own_output: bool = option(
        True,
        "Also draft from the sample's own prompt and response so far. It does where more of such a draft is expected "
        "to be accepted than of the other sources'.",
    )
    # In replays of five runs of up to 250,000 tokens nothing older than 262,144 tokens (6 MB) is of use.
    shared_tokens: int = option(
        262144,
        "Also draft from what the last responses of all prompts on the engine share, where that is more likely "
        "accepted. This many tokens of them are remembered, in 24 bytes each; 0: none. Not in reproducible runs.",
        low=0,
        high=1 << 27,
        expert=True,
    )

    def check(self) -> None:
        if self.window_start > self.window_max:
            raise SettingsError(
                f"--histospec.window_start must be at most --histospec.window_max ({self.window_max}), "
                f"got {self.window_start}"
            )
        if self.prefix_min > self.prefix_max:
            raise SettingsError(
                f"--histospec.prefix_min must be at most --histospec.prefix_max ({self.prefix_max}), "
                f"got {self.prefix_min}"
            )


@dataclass(frozen=True)
class DraftingSettings(Settings):
    """Options for the source of draft tokens, and for the bounds of a whole step (RLHFSpec 5.3)."""

    group: ClassVar[str] = "drafting"
    title: ClassVar[str] = "Where draft tokens come from, and how many a step verifies for all samples of an engine."

    source: str = option(
        HISTORY,
        "Where drafts come from. 'history' is earlier responses to the prompt, its other samples and the sample's own "
        "text. The next three are vLLM's own: 'ngram' looks up the sample's own text, 'draft_model' and 'eagle3' run "
        "--drafting.model. 'history+draft_model' and 'history+eagle3' use for each sample the one that yields more.",
        choices=SOURCES,
    )
    model: str = option(
        "",
        "Draft model, or the policy's EAGLE-3 head, for sources that run one. A model directory or a model of the hub. "
        "It stays as it was loaded while the policy learns.",
        kind="model",
    )
    # vLLM's examples use 3 to 5: each token more is one more pass of the draft model in every step.
    tokens: int = option(
        4,
        "Draft tokens that vLLM's own methods propose for a sample and step, of which the budget takes some; from "
        "history --histospec.window_max.",
        low=1,
        high=VLLM_MAX_DRAFT_TOKENS,
        expert=True,
    )
    runner: str = option(
        AUTO,
        "vLLM's model runner in engines that draft from history. 'auto': 'v2-async' on GPUs, where each engine proves "
        "that drafts change nothing before it drafts, and 'v1' elsewhere. 'v2-async' is vLLM's second model runner, "
        "scheduled asynchronously, as vLLM runs an engine without drafts on a GPU.",
        choices=(AUTO, V1, V2_ASYNC),
        expert=True,
    )
    probe_share: float = option(
        0.01,
        "Share of the decode steps that leave drafts out, a few in a row, to measure what drafts gain in the run. "
        "Where drafts make it slower, it switches them off and says so. 0: never. Not in reproducible runs.",
        low=0,
        high=0.1,
        expert=True,
    )

    @property
    def from_history(self) -> bool:
        """True if drafts come from history, alone or together with a model."""
        return self.source.partition("+")[0] == HISTORY

    @property
    def method(self) -> str:
        """vLLM's method that proposes drafts in its worker; "" for history alone."""
        return self.source.removeprefix(HISTORY).removeprefix("+")

    @property
    def model_runner(self) -> str:
        """The model runner; an undecided 'auto' is V1."""
        return V1 if self.runner == AUTO else self.runner

    def check(self) -> None:
        if self.model_runner != V1 and self.source != HISTORY:
            raise SettingsError(
                f"--drafting.runner {self.runner} needs --drafting.source history, not {self.source}, whose drafts can "
                "be cut on v1 alone"
            )
        needs = " or ".join((*WITH_MODEL, *BOTH))
        if self.model and self.method not in WITH_MODEL:
            raise SettingsError(f"--drafting.model is only used by --drafting.source {needs}, not by {self.source}")
        if self.method in WITH_MODEL and not self.model:
            raise SettingsError(
                f"--drafting.source {self.source} needs --drafting.model, a model directory or its name"
            )
