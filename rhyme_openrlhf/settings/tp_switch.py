"""Settings of adaptive tensor parallelism: which layouts a node has for the tail, and when it goes to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rhyme_openrlhf.settings.options import Settings, SettingsError, option

BY_HISTORY = "history"
BY_MAXIMUM = "maximum"
AUTO = "auto"
TOGETHER = "together"
TURNS = "turns"
LOWEST, HIGHEST = 2, 64
# As of --cpu.kv_cache_mb: some blocks of any model.
SMALLEST_KV_MB = 16


def tail_sizes(size: int, sizes: str) -> tuple[int, ...]:
    """Devices of each engine of the tail layouts, smaller ones first; `sizes` ("2,4") goes before `size`.

    Raises SettingsError.
    """
    if not sizes:
        return (size,)
    words = sizes.replace(",", " ").split()
    if not words or not all(word.isdecimal() and LOWEST <= int(word) <= HIGHEST for word in words):
        raise SettingsError(f"--tp_switch.sizes must be numbers from {LOWEST} to {HIGHEST} like 2,4, got {sizes!r}")
    return tuple(sorted({int(word) for word in words}))


def tail_profiles(profile: str, layouts: int) -> tuple[str, ...]:
    """Return the profile of each tail layout, smaller sizes first; one word means it for all. Raises SettingsError."""
    named = tuple(part.strip() for part in profile.split(",")) if layouts > 1 else (profile,)
    if len(named) == 1 and (layouts == 1 or named[0] in (AUTO, "none")):
        return named * layouts
    if len(named) != layouts:
        raise SettingsError(
            f"--tp_switch.profile must name one file for each of the {layouts} sizes of --tp_switch.sizes, smaller "
            f"sizes first, with commas between them, or be auto; got {profile!r}"
        )
    return named


@dataclass(frozen=True)
class TpSwitchSettings(Settings):
    """A rollout's last samples go on at engines with more tensor parallelism, on the same devices (PAT)."""

    group: ClassVar[str] = "tp_switch"
    title: ClassVar[str] = (
        "Adaptive tensor parallelism: the last samples of a rollout go on at engines of more devices each."
    )

    enable: bool = option(
        False,
        "Move a step's last samples to engines over more devices each. These engines are on the same devices, each "
        "over --tp_switch.size of them. A node's unfinished samples go there when that is predicted to shorten the "
        "rest of the rollout. Switches --move.enable on. So far it has run on CPUs only, never on a GPU.",
    )
    size: int = option(2, "Devices of each engine that gets the last samples (tail layout).", low=LOWEST, high=HIGHEST)
    sizes: str = option(
        "",
        "Several tail layouts instead of the one of --tp_switch.size, as '2,4': a node may switch more than once in a "
        "step, to more devices each time. The weights are on each device once more for each.",
        kind="plain",
        expert=True,
    )
    rule: str = option(
        BY_HISTORY,
        "Prediction of samples' lengths: 'history' from their prompts' earlier responses, 'maximum' as if each ran to "
        "--rollout.max_new_tokens (PAT's own rule).",
        choices=(BY_HISTORY, BY_MAXIMUM),
        expert=True,
    )
    samples: int = option(
        0,
        "Switch to the largest size when a node has at most this many unfinished samples; 0: by prediction.",
        low=0,
        high=100000,
        expert=True,
    )
    kv_cache_mb: int = option(
        0,
        "KV cache of each rank of a tail engine in MB; 0: the whole engine has as much as one of the others.",
        low=0,
        high=1048576,
        expert=True,
    )
    aligned_kv_cache_mb: int = option(
        0,
        "With GPUs: KV cache of each rank of the other engines in MB (without GPUs: --cpu.kv_cache_mb); 0: the rest of "
        "--vllm.gpu_memory_utilization.",
        low=0,
        high=1048576,
        expert=True,
    )
    kv_caches: str = option(
        AUTO,
        "Memory of the layouts' KV caches. 'together': all at once. 'turns': only that of the running layout, so a "
        "switch frees and takes memory. 'auto': together if they fit.",
        choices=(AUTO, TOGETHER, TURNS),
        expert=True,
    )
    reserve_mb: int = option(
        4096,
        "With GPUs: memory of a device that each rank takes beside weights and KV cache, in MB: CUDA context, NCCL, "
        "CUDA graphs, activations. vLLM prints these at its start.",
        low=0,
        high=1048576,
        expert=True,
    )
    device_mb: int = option(
        0,
        "With GPUs: memory of each in MB; 0: of the smallest in the machine that starts the run.",
        low=0,
        high=1048576,
        expert=True,
    )
    profile: str = option(
        AUTO,
        "Profile of the tail layout, from `rhyme profile` with --vllm.tensor_parallel_size as --tp_switch.size. For "
        "several sizes give one each, smaller first, with commas. 'auto': the kept profile, or else a quick one "
        "measured at the start.",
        kind="profiles",
        expert=True,
    )
    status_s: float = option(0.25, "Seconds between two decisions on a switch.", low=0.02, high=60, expert=True)

    def check(self) -> None:
        """Check that the sizes are sizes and have profiles, and that each KV cache has a usable size."""
        for name in ("kv_cache_mb", "aligned_kv_cache_mb"):
            if 0 < (value := getattr(self, name)) < SMALLEST_KV_MB:
                raise SettingsError(f"{self.flag(name)} must be 0 or at least {SMALLEST_KV_MB}, got {value}")
        tail_profiles(self.profile, len(self.all_sizes))

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """Devices of each engine of the tail layouts, smaller ones first."""
        return tail_sizes(self.size, self.sizes)
