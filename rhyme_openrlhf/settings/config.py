"""All settings of one run: the features' dataclasses together, and what follows from several of them.

The command line, the control plane's schema and the web form are derived from `SETTINGS_CLASSES` and from nowhere
else. OpenRLHF's own options are not repeated here: they come from its own parser (`cli/upstream.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.settings.control import ControlSettings
from rhyme_openrlhf.settings.drafting import AUTO as RUNNER_AUTO
from rhyme_openrlhf.settings.drafting import HISTORY, V1, V2_ASYNC, DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.engine import CpuSettings, EngineSettings
from rhyme_openrlhf.settings.histopipe import DispatchSettings, HistoPipeSettings
from rhyme_openrlhf.settings.history import HistorySettings
from rhyme_openrlhf.settings.latency import NONE, EmulateSettings, LatencySettings
from rhyme_openrlhf.settings.moves import MoveSettings, ReallocationSettings
from rhyme_openrlhf.settings.options import Settings, from_mapping
from rhyme_openrlhf.settings.run import LimitSettings, RunSettings
from rhyme_openrlhf.settings.telemetry import TelemetrySettings
from rhyme_openrlhf.settings.tp_switch import BY_HISTORY, TpSwitchSettings
from rhyme_openrlhf.settings.weights import AUTO, BUFFER, OPENRLHF, WeightSettings

# Why a reproducible run has no drafts on vLLM's second model runner.
SEEDED = "how long drafts may be depends there on how many samples run, and drafts decide what a seed samples"


@dataclass(frozen=True)
class RhymeSettings:
    """All settings of one run."""

    histospec: HistoSpecSettings = field(default_factory=HistoSpecSettings)
    drafting: DraftingSettings = field(default_factory=DraftingSettings)
    latency: LatencySettings = field(default_factory=LatencySettings)
    history: HistorySettings = field(default_factory=HistorySettings)
    weights: WeightSettings = field(default_factory=WeightSettings)
    dispatch: DispatchSettings = field(default_factory=DispatchSettings)
    histopipe: HistoPipeSettings = field(default_factory=HistoPipeSettings)
    move: MoveSettings = field(default_factory=MoveSettings)
    reallocation: ReallocationSettings = field(default_factory=ReallocationSettings)
    tp_switch: TpSwitchSettings = field(default_factory=TpSwitchSettings)
    run: RunSettings = field(default_factory=RunSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    control: ControlSettings = field(default_factory=ControlSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    emulate: EmulateSettings = field(default_factory=EmulateSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    cpu: CpuSettings = field(default_factory=CpuSettings)

    @property
    def keeps_history(self) -> bool:
        """Return whether history workers have work: drafts come from them, or HistoPipe or TP switches need lengths."""
        predicts = self.tp_switch.enable and self.tp_switch.rule == BY_HISTORY
        return self.drafts_from_history or self.histopipe.enable or predicts

    @property
    def drafts_from_history(self) -> bool:
        """Return whether drafts come from earlier responses."""
        return self.histospec.enable and self.drafting.from_history

    @classmethod
    def from_namespace(cls, args: Any) -> RhymeSettings:
        """Build from OpenRLHF's nested namespace (`args.histospec.enable`, ...). Raises SettingsError."""
        groups: dict[str, Any] = {}
        for group in SETTINGS_CLASSES:
            node = getattr(args, group.group)
            names = [f.name for f in dataclasses.fields(group)]
            groups[group.group] = from_mapping(group, {name: getattr(node, name) for name in names})
        return cls(**groups)

    def with_transport(self, on_gpus: bool, lora: bool) -> RhymeSettings:
        """Return these settings with 'auto' of --weights.transport decided. `lora`: the policy trains adapters.

        A process group breaks when an engine dies, and layouts that take turns or engines that load between two turns
        cannot all join one broadcast. OpenRLHF 0.11.2 broadcasts LoRA's adapters by PEFT's names, which vLLM refuses.
        So these runs use the buffer on GPUs, too.
        """
        if self.weights.transport != AUTO:
            return self
        needs_buffer = self.samples_move or self.histopipe.enable or lora or not on_gpus
        weights = dataclasses.replace(self.weights, transport=BUFFER if needs_buffer else OPENRLHF)
        return dataclasses.replace(self, weights=weights)

    def with_runner(self, runner: str) -> RhymeSettings:
        """Return these settings with 'auto' of --drafting.runner decided."""
        return dataclasses.replace(self, drafting=dataclasses.replace(self.drafting, runner=runner))

    @property
    def gpu_runner(self) -> tuple[str, str]:
        """Return vLLM's model runner of engines on GPUs, an undecided 'auto' decided, and the reason as a clause.

        The reason is "" where nothing was to be decided.
        """
        if not self.histospec.enable:
            return V2_ASYNC, ""
        if self.drafting.runner != RUNNER_AUTO:
            return self.drafting.runner, ""
        if self.drafting.source != HISTORY:
            return V1, f"drafts of --drafting.source {self.drafting.source} can be cut there alone"
        if self.emulate.profile:
            return V1, "steps on another machine's clock are scheduled one after the other (--emulate.profile)"
        if self.run.reproducible:
            return V1, f"with v2-async, {SEEDED} (--run.reproducible)"
        return V2_ASYNC, (
            "each engine proves before its first sample that drafts change nothing there, or generates without them"
        )

    @property
    def weight_transport(self) -> str:
        """The transport of weights; an undecided 'auto' is the buffer."""
        return BUFFER if self.weights.transport == AUTO else self.weights.transport

    @property
    def weights_by_buffer(self) -> bool:
        """Return whether the buffer carries weights."""
        return self.weight_transport == BUFFER

    @property
    def samples_move(self) -> bool:
        """True where samples are kept apart from the engines: on request, or for a feature that moves samples."""
        return self.move.enable or self.reallocation.enable or self.tp_switch.enable

    @property
    def outlives_engines(self) -> bool:
        """Return whether a run goes on without a lost engine; a broadcast's process group would wait for that engine.

        Samples at home go on elsewhere; the pipeline has prompt groups generated again.
        """
        return (self.samples_move or self.histopipe.enable) and self.weights_by_buffer

    @property
    def drafts_planned(self) -> bool:
        """Return whether drafts are cut by step times.

        Reproducible runs plan nothing. Step times, and so the number of drafted tokens, are never the same twice, and
        drafts
        decide which random numbers a sample draws.
        """
        return self.histospec.enable and self.latency.profile != NONE and not self.run.reproducible

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Plain nested dictionary, as the run record writes it."""
        return dataclasses.asdict(self)


SETTINGS_CLASSES: tuple[type[Settings], ...] = (
    HistoSpecSettings,
    DraftingSettings,
    LatencySettings,
    HistorySettings,
    WeightSettings,
    DispatchSettings,
    HistoPipeSettings,
    MoveSettings,
    ReallocationSettings,
    TpSwitchSettings,
    RunSettings,
    LimitSettings,
    ControlSettings,
    TelemetrySettings,
    EmulateSettings,
    EngineSettings,
    CpuSettings,
)

# Flags of the version before this one: `rhyme train` and a control plane take them once more, and ignore them.
# Each with what to do instead.
OLD_FLAGS: Mapping[str, str] = {
    "--history.nice": "leave it out, because history workers always leave the processors to everybody else.",
    "--histospec.batch_limits": "leave it out, because a batch that is too large for drafts gets none.",
}
