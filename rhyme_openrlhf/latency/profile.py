"""A profile: measured points of one model on one kind of hardware at one tensor-parallel size, its file and its name.

Invariants:

- A profile is frozen, and `read` returns what `write` wrote.
- A file that is torn, of another format or of impossible values is refused with the file and the line.
- `check_fits` refuses a profile of another subject than what runs, and names both side by side.
- A profile is found by the model's architecture, the hardware, the number format and the tensor-parallel size.
- Units are seconds, bytes and tokens.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rhyme_openrlhf.regular_files import read_regular
from rhyme_openrlhf.settings.drafting import HISTORY, V1, DraftingSettings
from rhyme_openrlhf.user_cache import user_cache

FORMAT = 1
# Bytes of a profile; a real one has some 20 KB.
LARGEST = 4 * 1024 * 1024
Origin = Literal["measured", "derived"]
P = TypeVar("P", bound="_Point")


class ProfileError(ValueError):
    """A profile cannot be read, or is of something else; the message says what, where, and what to do."""


@dataclass(frozen=True)
class Subject:
    """The subject of a profile. `model` is its architecture in short, so two trained copies of it share a profile."""

    model: str
    hardware: str
    dtype: str
    tensor_parallel_size: int


@dataclass(frozen=True)
class _Point:
    """One line of a profile: numbers only, in the order of the fields."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            whole = item.type == "int"
            # bool is an int, and NaN a float; neither is a measurement.
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"{item.name} must be {'a whole number' if whole else 'a number'}, got {value!r}")
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"{item.name} must be finite and not negative, got {value!r}")


@dataclass(frozen=True)
class StepPoint(_Point):
    """A decode step of `running` samples with `context` tokens in all and `drafts` draft tokens in all.

    `seconds`: median over `steps` repeats; `spread`: half the distance between their quartiles.
    """

    running: int
    context: int
    drafts: int
    seconds: float
    spread: float
    steps: int


@dataclass(frozen=True)
class PrefillPoint(_Point):
    """Prefill of `sequences` sequences of `length` tokens each, from nothing in the cache."""

    sequences: int
    length: int
    seconds: float
    spread: float
    repeats: int


@dataclass(frozen=True)
class Profile:
    """All measurements of one subject.

    `padded_rows`: token counts to which the engine pads a step (CUDA graph sizes; the CPU's few shapes), ascending;
    above the last it pads no more. `kv_bytes_per_token`: of all layers, keys and values, on one rank.
    `kv_bytes_per_second`: one way, per rank (PAT's B_net^uni); 0: not measured. `weight_load_seconds`: a weight version
    into one engine; 0: not measured. `beside`: engines on the same machine that did the same while steps and prefills
    were measured. `notes` say how the points came about. `unspeculated`: decode steps of an engine of the same subject
    without speculation, which vLLM may run otherwise (on GPUs asynchronously, with another model runner); none: not
    measured.
    """

    subject: Subject
    origin: Origin
    steps: tuple[StepPoint, ...]
    prefills: tuple[PrefillPoint, ...] = ()
    padded_rows: tuple[int, ...] = ()
    kv_cache_tokens: int = 0
    kv_bytes_per_token: int = 0
    kv_bytes_per_second: float = 0.0
    weight_load_seconds: float = 0.0
    beside: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    unspeculated: tuple[StepPoint, ...] = ()

    def __post_init__(self) -> None:
        plain = {(p.running, p.context) for p in self.steps if p.drafts == 0}
        if not plain:
            raise ValueError("a profile needs decode steps without drafts")
        places = [(p.running, p.context, p.drafts) for p in self.steps]
        if len(set(places)) != len(places):
            raise ValueError("a profile has each point once")
        every = (*self.steps, *self.unspeculated)
        if any(p.running < 1 for p in every) or any(p.seconds <= 0 for p in every):
            raise ValueError("a decode step has at least one running sample and takes time")
        if any(p.drafts for p in self.unspeculated):
            raise ValueError("a decode step without speculation verifies no drafts")
        if any(min(p.sequences, p.length) < 1 or p.seconds <= 0 for p in self.prefills):
            raise ValueError("a prefill has at least one sequence and token and takes time")
        if list(self.padded_rows) != sorted(set(self.padded_rows)):
            raise ValueError("padded_rows must ascend")
        if isinstance(self.beside, bool) or not isinstance(self.beside, int) or self.beside < 0:
            raise ValueError(f"beside must be a whole number of engines, got {self.beside!r}")

    def check_fits(self, wanted: Subject, where: str) -> None:
        """Raises ProfileError unless this profile is of `wanted`; `where` is the file, for the message."""
        if self.subject == wanted:
            return
        pairs = [
            f"{name} is {getattr(self.subject, name)!r} there and {getattr(wanted, name)!r} here"
            for name in (item.name for item in dataclasses.fields(Subject))
            if getattr(self.subject, name) != getattr(wanted, name)
        ]
        raise ProfileError(
            f"{where} is a profile of something else: {'; '.join(pairs)}. Make one of this with `rhyme profile`."
        )


def to_text(profile: Profile) -> str:
    """`profile` as JSON, one point a line, so that a person and a diff can read it; `parse` reads it."""
    head = {
        "format": FORMAT,
        "subject": dataclasses.asdict(profile.subject),
        **{
            name: getattr(profile, name)
            for name in (item.name for item in dataclasses.fields(Profile))
            if name not in ("subject", "steps", "prefills", "unspeculated")
        },
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    text = "{\n" + "\n".join(lines) + "\n"
    points = {"prefills": profile.prefills, "unspeculated": profile.unspeculated, "steps": profile.steps}
    return text + ",\n".join(_section(name, found) for name, found in points.items()) + "\n}\n"


def write(profile: Profile, path: Path) -> None:
    """Write `profile` for `read`: whole, or not at all, also where runs of several machines write it at once."""
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    unfinished.write_text(to_text(profile), encoding="utf-8")
    unfinished.replace(path)


def _section(name: str, points: Sequence[_Point]) -> str:
    if not points:
        return f'  "{name}": []'
    rows = ",\n".join("    " + json.dumps(list(dataclasses.astuple(point))) for point in points)
    return f'  "{name}": [\n{rows}\n  ]'


def read(path: Path) -> Profile:
    """Return the profile at `path`. Raise ProfileError."""
    return parse(read_text(path), f"the profile {path}")


def read_text(path: Path) -> str:
    """Return the text at `path`, for `parse`. Raise ProfileError."""
    try:
        return read_regular(path, LARGEST).decode("utf-8")
    except OSError as error:
        raise ProfileError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"the profile {path} is no text, at byte {error.start}") from error


def parse(text: str, what: str) -> Profile:
    """Return the profile in `text`; `what` names it in errors. Raise ProfileError."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ProfileError(f"{what} is no JSON: line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or thousands of brackets
        raise ProfileError(f"{what} is no JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise ProfileError(f"{what} has format {found!r}; this version reads format {FORMAT}")
    steps = _points(StepPoint, content, "steps", text, what)
    prefills = _points(PrefillPoint, content, "prefills", text, what)
    # Not in profiles of version 0.1's first months.
    unspeculated = _points(StepPoint, {"unspeculated": [], **content}, "unspeculated", text, what)
    try:
        return Profile(
            subject=Subject(**content["subject"]),
            origin=content["origin"],
            steps=steps,
            prefills=prefills,
            padded_rows=tuple(content["padded_rows"]),
            kv_cache_tokens=content["kv_cache_tokens"],
            kv_bytes_per_token=content["kv_bytes_per_token"],
            # Not in profiles of version 0.1's first days.
            kv_bytes_per_second=_seconds_or_rate(content, "kv_bytes_per_second"),
            weight_load_seconds=_seconds_or_rate(content, "weight_load_seconds"),
            beside=content.get("beside", 0),
            versions=content["versions"],
            notes=tuple(content["notes"]),
            unspeculated=unspeculated,
        )
    except KeyError as error:
        raise ProfileError(f"{what} lacks {error.args[0]!r}") from error
    except (TypeError, ValueError) as error:
        raise ProfileError(f"{what}: {error}") from error


def _seconds_or_rate(content: dict[str, Any], name: str) -> float:
    """Return a number that may be missing (0: not measured). Raise ValueError for anything else."""
    value = content.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number that is finite and not negative, got {value!r}")
    return float(value)


def _points(kind: type[P], content: dict[str, Any], section: str, text: str, what: str) -> tuple[P, ...]:
    rows = content.get(section)
    if not isinstance(rows, list):
        raise ProfileError(f"{what} lacks the list {section!r}")
    names = [item.name for item in dataclasses.fields(kind)]
    points = []
    for number, row in enumerate(rows):
        try:
            if not isinstance(row, list) or len(row) != len(names):
                raise ValueError(f"a point of {section!r} is {len(names)} numbers ({', '.join(names)})")
            points.append(kind(*row))
        except ValueError as error:
            line = _line_of(text, section, number)
            raise ProfileError(f"{what}, line {line}: {error}") from error
    return tuple(points)


def _line_of(text: str, section: str, number: int) -> int:
    """Return the line (from 1) of a section's point: `write` puts one on each line, after the section's name."""
    for line, content in enumerate(text.splitlines(), start=1):
        if f'"{section}"' in content:
            return line + 1 + number
    return 1


CPU_INFO = Path("/proc/cpuinfo")
# Bytes of a number in the KV cache, which has the engine's number format.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def model_name(config: Any, drafting: DraftingSettings) -> str:
    """Return a Hugging Face configuration in short: all that decides step times, and nothing that training changes.

    The draft model of vLLM's own methods is part of every step, so it is part of the name.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return (
        f"{config.architectures[0]} {config.num_hidden_layers}x{config.hidden_size} "
        f"heads {config.num_attention_heads}/{heads} vocabulary {config.vocab_size}{_drafter(drafting)}"
    )


def _drafter(drafting: DraftingSettings) -> str:
    if drafting.source == HISTORY:
        return ""
    return " ".join(filter(None, (f", {drafting.tokens} drafts by", drafting.source, Path(drafting.model).name)))


def kv_bytes_per_token(config: Any, dtype: str, tensor_parallel_size: int) -> int:
    """Keys and values of a token in all layers, on one rank (grouped-query heads; replicated where ranks are more).

    Latent attention has one compressed row for all heads, on every rank.
    """
    if latent := getattr(config, "kv_lora_rank", None):
        return int(config.num_hidden_layers) * (int(latent) + int(config.qk_rope_head_dim)) * BYTES[dtype]
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    on_rank = max(heads // tensor_parallel_size, 1)
    return 2 * int(config.num_hidden_layers) * on_rank * int(size) * BYTES[dtype]


def hardware_name(gpus: tuple[str, ...]) -> str:
    """Return the GPU's name, or the CPU's with the number of its cores."""
    if gpus:
        return gpus[0]
    text = CPU_INFO.read_text(encoding="utf-8", errors="replace") if CPU_INFO.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"


def file_name(subject: Subject, runner: str = V1) -> str:
    """Return a file name for the subject's profile; each model runner of drafts has its own."""
    words = f"{subject.model} {subject.hardware} {subject.dtype} tp{subject.tensor_parallel_size}"
    if runner != V1:
        words += f" {runner}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-").lower() + ".json"


def folder() -> Path:
    """Return the default folder of profiles."""
    return user_cache() / "profiles"
