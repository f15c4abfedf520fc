"""Every setting of this project, one frozen dataclass per feature.

The command line, and later the API's schema and the web form, are derived from these classes and from nowhere else.
OpenRLHF's own options are not repeated here: they come from its own parser (`cli/upstream.py`).
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from rhyme_openrlhf.settings.dispatch import DispatchSettings
from rhyme_openrlhf.settings.drafting import HISTORY, DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.settings.latency import NONE, EmulateSettings, LatencySettings
from rhyme_openrlhf.settings.moves import MoveSettings
from rhyme_openrlhf.settings.options import Settings, SettingsError, from_mapping, option
from rhyme_openrlhf.settings.reallocation import ReallocationSettings
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings

# Public ids of runs and attempts: as many hexadecimal digits as the control plane's tables keep (api/store/models.py).
UID_DIGITS = 16
# Values of --weights.transport.
AUTO = "auto"
BUFFER = "buffer"
OPENRLHF = "openrlhf"
_UID = re.compile(rf"[0-9a-f]{{{UID_DIGITS}}}")


def new_uid() -> str:
    """A new public id."""
    return secrets.token_hex(UID_DIGITS // 2)


@dataclass(frozen=True)
class HistorySettings(Settings):
    """History workers (RhymeRL, section 4.2): who keeps what was generated before."""

    group: ClassVar[str] = "history"
    title: ClassVar[str] = "History workers: Ray actors on CPU that keep and index each prompt's last responses."

    workers: int = option(1, "History workers in the cluster; each owns a share of the prompts.", low=1, high=1024)
    cpus_per_worker: float = option(
        0.5,
        "CPUs for each history worker: what Ray reserves, and its limit where it may make a cgroup (0: neither). It "
        "works with one thread: for more than one CPU take more workers.",
        low=0,
        high=64,
    )
    nice: int = option(
        19,
        "Priority of the history workers, as of the command nice: 19 leaves the CPUs to everybody else.",
        low=0,
        high=19,
    )
    memory_gb: float = option(
        16.0,
        "GB of each node's memory for draft indexes (15 bytes a token) and the responses they are made of (about 1 "
        "byte a token); what is over is compressed to the disk and brought back when its prompt comes.",
        low=0.001,
        high=100000,
    )
    spill_dir: str = option(
        "",
        "Directory on each node for draft indexes beyond --history.memory_gb. If not given: in the run directory.",
        kind="output",
    )
    # RhymeRL keeps 1. With 2, three recorded runs of the embedded task give 7 to 30 % more tokens per decode step from
    # the third epoch on, for twice the memory.
    rollouts: int = option(
        2,
        "Rollouts of each prompt that its draft index covers, the last ones: each costs the memory of its responses.",
        low=1,
        high=8,
    )
    fetch_timeout_s: float = option(
        10.0,
        "Seconds an engine waits for a prompt's draft index, while it already generates; after that the prompt is "
        "generated without drafts.",
        low=0.1,
        high=3600,
    )


@dataclass(frozen=True)
class WeightSettings(Settings):
    """How trained weights reach the engines (RhymeRL, section 4.2: weight buffers)."""

    group: ClassVar[str] = "weights"
    title: ClassVar[str] = "Weight buffer: how trained weights reach the rollout engines."

    transport: str = option(
        AUTO,
        "'buffer' writes numbered versions into one shared-memory copy a node; 'openrlhf' uses OpenRLHF's own "
        "broadcast (NCCL or CUDA IPC; gloo without a GPU). 'auto' takes OpenRLHF's own on GPUs, and the buffer without "
        "a GPU and for runs with --move.enable, --reallocation.enable, --tp_switch.enable, --histopipe.enable or "
        "--ds.lora.rank.",
        choices=(AUTO, BUFFER, OPENRLHF),
    )
    bucket_mb: int = option(512, "Size in MB of the pieces in which a weight version is published.", low=1, high=16384)
    check_syncs: int = option(
        1,
        "After this many first weight syncs, compare the log-probabilities of a fixed sequence in every engine with "
        "the trained model's; the difference is recorded, and a large one is warned of.",
        low=0,
    )
    timeout_s: float = option(
        600.0, "Seconds after which publishing or loading a weight version is given up.", low=1, high=86400
    )


@dataclass(frozen=True)
class RunSettings(Settings):
    """The run record and what the terminal shows."""

    group: ClassVar[str] = "run"
    title: ClassVar[str] = "Run record: where a run writes what it did, and what the terminal shows."

    dir: str = option(
        "", "Run directory; must be new or empty. If not given: runs/<date>-<time>-<name>.", kind="output"
    )
    name: str = option("run", "Short name of the run, used in its directory's name.", kind="plain")
    reproducible: bool = option(
        False,
        "Seed the prompt order and every request from --train.seed, order samples by prompt and wait for each prompt's "
        "history, so that two runs on the same machine sample the same tokens (OpenRLHF itself seeds neither).",
    )
    progress: str = option(
        "auto",
        "'bars' for a terminal, 'lines' for a plain log, 'off'; 'auto' picks by whether the output is a terminal.",
        choices=("auto", "bars", "lines", "off"),
    )
    worker_logs: bool = option(False, "Print the Ray workers' own output on the terminal too (it is always in logs/).")


@dataclass(frozen=True)
class LimitSettings(Settings):
    """How long anything may take before the run is ended in order, instead of hanging."""

    group: ClassVar[str] = "limits"
    title: ClassVar[str] = "Limits: how long a stage may go without progress before the run is ended, saying why."

    reward_s: float = option(
        30.0,
        "Seconds the reward function (or reward server, with its retries) may take for one sample.",
        low=0.1,
        high=86400,
    )
    rollout_s: float = option(
        600.0, "Seconds a rollout may go on without one new token and without one finished sample.", low=1, high=86400
    )
    stage_s: float = option(
        3600.0,
        "Seconds any other stage may take: start-up, experience, training, weight sync, evaluation, checkpoint.",
        low=1,
        high=604800,
    )
    # Schedulers (Slurm, Kubernetes, Ray) kill 30 s after SIGTERM; the other half is for the end of the run.
    sigterm_s: float = option(
        15.0,
        "Seconds that a run which gets SIGTERM has to complete its step and save a checkpoint; then it ends as it is.",
        low=0,
        high=86400,
    )


@dataclass(frozen=True)
class ControlSettings(Settings):
    """Where a run reports to. The token is none of the settings: they are written to the run record."""

    group: ClassVar[str] = "control"
    title: ClassVar[str] = (
        "Control plane: where a run reports what it does, so that others can see, compare and stop it."
    )

    url: str = option(
        "",
        "Address of a control plane (`rhyme serve`) to report to, as http://HOST:PORT. The token comes from "
        "--control.token_file or the environment variable RHYME_CONTROL_TOKEN. If not given, nothing is reported.",
        kind="url",
    )
    token_file: str = option(
        "", "File with the access token for --control.url; keep it readable for you alone.", kind="file"
    )
    run_uid: str = option(
        "",
        "Id of the run there (16 hexadecimal digits), to go on with a run that is already shown; else a new one.",
        kind="plain",
    )
    attempt_uid: str = option(
        "", "Id of this start of the run there (16 hexadecimal digits); made here if not given.", kind="plain"
    )
    outbox_mb: int = option(
        1024,
        "MB of events that may wait for a control plane that does not answer; of more, the oldest are not sent (they "
        "stay in the run directory, for `rhyme runs import`).",
        low=1,
        high=100000,
    )

    def check(self) -> None:
        if self.url:
            self._check_url()
        for name in ("run_uid", "attempt_uid"):
            uid = getattr(self, name)
            if uid and not _UID.fullmatch(uid):
                raise SettingsError(f"{self.flag(name)} must be {UID_DIGITS} hexadecimal digits (0-9a-f), got {uid!r}")

    def _check_url(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            usable = False
        if not usable:
            raise SettingsError(f"--control.url must be http://HOST:PORT or https://HOST:PORT, got {self.url!r}")
        if parts.username is not None or parts.query or parts.fragment:
            # It is shown in the run record, so nothing secret may be in it; and its value is not repeated here.
            raise SettingsError(
                "--control.url must hold no user, password, query or fragment: give the token by "
                "--control.token_file or RHYME_CONTROL_TOKEN"
            )

    def with_uids(self) -> ControlSettings:
        """These settings with the ids that were not given made up: random, so unique without asking anyone."""
        return dataclasses.replace(self, run_uid=self.run_uid or new_uid(), attempt_uid=self.attempt_uid or new_uid())


@dataclass(frozen=True)
class TelemetrySettings(Settings):
    """What is recorded beside the events that cost nothing."""

    group: ClassVar[str] = "telemetry"
    title: ClassVar[str] = "Telemetry: responses and machine figures that a run keeps for the dashboard."

    sample_groups: int = option(
        2,
        "Prompts a training step whose responses are kept in the run directory, with what was drafted of them; which "
        "ones changes with every step. 0: none.",
        low=0,
        high=64,
    )
    samples_mb: int = option(
        64, "Most MB of kept responses in the run directory; of more, those of the oldest steps are deleted.", low=1
    )
    system_s: float = option(
        5.0,
        "Seconds between two looks at each node's processors, memory, disk and GPUs. 0: none.",
        low=0,
        high=3600,
    )

    def check(self) -> None:
        if 0 < self.system_s < 1:
            raise SettingsError(f"--telemetry.system_s must be 0, or at least 1, got {self.system_s:g}")


# What vLLM 0.29.0 takes for an engine in a Ray actor, of any size of GPU (engine/arg_utils.py).
VLLM_SAMPLES, VLLM_STEP_TOKENS = 128, 2048
# Rows that are worth their memory with few samples: the largest CUDA graph that vLLM 0.29.0 captures by default. A
# vocabulary of 152,000 tokens then takes 0.3 GB for each array of that shape.
LEAST_ROWS = 512


def reserved_rows(samples: int, drafts: int) -> int:
    """Return the rows of logits that an engine on a GPU reserves memory for, with drafts of up to `drafts` tokens.

    At least a draft token for each sample, and LEAST_ROWS where so many can come about.
    """
    return min(samples * (1 + drafts), max(2 * samples, LEAST_ROWS))


@dataclass(frozen=True)
class EngineSettings(Settings):
    """How much one engine computes at once."""

    group: ClassVar[str] = "engine"
    title: ClassVar[str] = "Size of each vLLM engine: samples it runs at once, and tokens of a step."

    max_num_seqs: int = option(
        0,
        f"Samples an engine runs at once. 0: as vLLM chooses, {VLLM_SAMPLES}. More need more memory beside the KV "
        "cache: a step's logits grow with them.",
        low=0,
        high=4096,
    )
    max_num_batched_tokens: int = option(
        0,
        "Tokens an engine computes in a step, of prompts, samples and drafts together. 0: as vLLM chooses, "
        f"{VLLM_STEP_TOKENS}. More let prompts start sooner.",
        low=0,
        high=1 << 20,
    )

    def check(self) -> None:
        tokens = self.max_num_batched_tokens or VLLM_STEP_TOKENS
        samples = self.max_num_seqs or VLLM_SAMPLES
        if tokens < samples:
            raise SettingsError(
                f"--engine.max_num_batched_tokens must be at least --engine.max_num_seqs ({samples}), a token for each "
                f"sample, got {tokens}"
            )

    def arguments(self) -> dict[str, int]:
        """Return vLLM's arguments for what is given."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}


@dataclass(frozen=True)
class CpuSettings(Settings):
    """Only read on a machine without a GPU."""

    group: ClassVar[str] = "cpu"
    title: ClassVar[str] = "Without a GPU only (embedded model, trials): ignored where a GPU is."

    kv_cache_mb: int = option(256, "KV cache of each engine in MB of host memory.", low=16, high=1048576)
    dtype: str = option(
        "float32",
        "Number format of policy and engines, in place of --ds.param_dtype: most CPUs train in bfloat16 ten times "
        "slower.",
        choices=("bfloat16", "float32"),
    )


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
        """Whether history workers have anything to do: drafts come from them, or HistoPipe ranks by their lengths."""
        return self.drafts_from_history or self.histopipe.enable

    @property
    def drafts_from_history(self) -> bool:
        """Whether drafts come from earlier responses."""
        return self.histospec.enable and self.drafting.source == HISTORY

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

    @property
    def weight_transport(self) -> str:
        """What carries weights; 'auto' that nobody has decided is the buffer."""
        return BUFFER if self.weights.transport == AUTO else self.weights.transport

    @property
    def weights_by_buffer(self) -> bool:
        """Whether the buffer carries weights."""
        return self.weight_transport == BUFFER

    @property
    def samples_move(self) -> bool:
        """Whether samples are kept apart from the engines: asked for, or needed by what moves them."""
        return self.move.enable or self.reallocation.enable or self.tp_switch.enable

    @property
    def outlives_engines(self) -> bool:
        """Whether a run goes on without an engine that is gone: a broadcast's process group would wait for it.

        Samples at home go on elsewhere; the pipeline has prompt groups generated again.
        """
        return (self.samples_move or self.histopipe.enable) and self.weights_by_buffer

    @property
    def drafts_planned(self) -> bool:
        """Whether drafts are cut by step times.

        Reproducible runs plan nothing: what a step took, and so how much is drafted, is never the same twice, and
        drafts decide which random numbers a sample draws.
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
