"""Recorded workloads as a file: JSON lines, one a sample, in any order of the samples within a step.

    {"step": 1, "epoch": 1, "prompt": "a1b2", "sample": 0, "prompt_tokens": 180, "length": 12, "reward": 0.5,
     "hits": [0, 3, 0, 4]}

`prompt` is any string that is the same whenever the prompt comes again; steps are numbered from 1 without gaps. Only
`step`, `epoch`, `prompt`, `prompt_tokens` and `length` are needed. `hits`: draft tokens accepted in each decode step of
the response, in order, so that they and the steps are its tokens but the first, which the prefill makes; `drafted`:
draft tokens of each of those steps (without it, as many as the live window would allow). `reward` is checked to be a
number and decides nothing; other keys are allowed. A line may also be a prompt with `lengths` (and `hits`, a list of
lists) of several samples instead of `length`, as a run's `lengths.jsonl` has them.

Invariant: whatever is wrong is refused with the file and the line.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rhyme_openrlhf.simulation.recorded_drafts import from_hits
from rhyme_openrlhf.simulation.workload import Drafting, PromptLoad, StepLoad, Workload, WorkloadError


@dataclass
class _Prompt:
    tokens: int
    engine: int
    lengths: list[int] = field(default_factory=list)
    drafting: list[Drafting] = field(default_factory=list)


def read_trace(path: Path) -> Workload:
    """The workload of a trace file. Raises WorkloadError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"the trace {path} cannot be read: {error}") from error
    return parse_trace(lines, str(path))


def parse_trace(lines: Iterable[str], name: str) -> Workload:
    """The workload of a trace's lines; `name` for messages. Raises WorkloadError."""
    steps: dict[int, dict[str, _Prompt]] = defaultdict(dict)
    epochs: dict[int, int] = {}
    numbers: dict[str, int] = {}
    seen: dict[tuple[int, str, int], int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"the trace {name}, line {number}"
        try:
            row = json.loads(line)
            step, epoch = _whole(row, "step"), _whole(row, "epoch")
            prompt, tokens = str(row["prompt"]), _whole(row, "prompt_tokens")
            sample = _whole(row, "sample", 0) if "length" in row and "sample" in row else None
            lengths = _lengths(row)
            drafting = _drafting(row, lengths)
            _check_reward(row)
        except json.JSONDecodeError as error:
            raise WorkloadError(f"{where}: no JSON: {error.msg}") from error
        except KeyError as error:
            raise WorkloadError(f"{where}: lacks {error}") from error
        except TypeError as error:
            raise WorkloadError(f"{where}: lacks what a sample has: {error}") from error
        except ValueError as error:
            raise WorkloadError(f"{where}: {error}") from error
        if epochs.setdefault(step, epoch) != epoch:
            raise WorkloadError(f"{where}: step {step} is in two epochs")
        if sample is not None:
            before = seen.setdefault((step, prompt, sample), number)
            if before != number:
                raise WorkloadError(f"{where}: sample {sample} of {prompt!r} in step {step} is in line {before}")
        numbers.setdefault(prompt, len(numbers))
        load = steps[step].setdefault(prompt, _Prompt(tokens, _engine(row)))
        load.lengths += lengths
        load.drafting += drafting
    if sorted(steps) != list(range(1, len(steps) + 1)) or not steps:
        raise WorkloadError(f"the trace {name} must have steps numbered from 1 without gaps")
    loads = tuple(
        StepLoad(epochs[step], tuple(_load(numbers[prompt], load) for prompt, load in steps[step].items()))
        for step in sorted(steps)
    )
    longest = max(length for load in loads for prompt in load.prompts for length in prompt.lengths)
    return Workload(name, "a trace", loads, longest)


def _load(number: int, load: _Prompt) -> PromptLoad:
    drafting = tuple(load.drafting) if any(load.drafting) else ()
    return PromptLoad(number, load.tokens, tuple(load.lengths), drafting, load.engine)


def _whole(row: dict[str, Any], key: str, least: int = 1) -> int:
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be a whole number from {least}, got {value!r}")
    return value


def _engine(row: dict[str, Any]) -> int:
    """Where all of the row's samples began; -1 if that is not one engine, or not noted."""
    engines = row.get("engines")
    found = set(engines) if isinstance(engines, list) and all(isinstance(one, int) for one in engines) else set()
    return found.pop() if len(found) == 1 else -1


def _lengths(row: dict[str, Any]) -> list[int]:
    if "lengths" not in row:
        return [_whole(row, "length")]
    if not isinstance(row["lengths"], list) or not row["lengths"]:
        raise ValueError(f"lengths must be a list of whole numbers, got {row['lengths']!r}")
    return [_whole({"lengths": one}, "lengths") for one in row["lengths"]]


def _check_reward(row: dict[str, Any]) -> None:
    rewards = row.get("reward", ())
    for reward in rewards if isinstance(rewards, list | tuple) else [rewards]:
        # A reward that was not finite is written as null.
        if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
            raise ValueError(f"reward must be a number, got {reward!r}")
        if reward is not None and not math.isfinite(reward):
            raise ValueError(f"reward must be finite, got {reward!r}")


def _drafting(row: dict[str, Any], lengths: list[int]) -> list[Drafting]:
    """Of each of the row's samples; empty where nothing was noted."""
    if "hits" not in row:
        if "drafted" in row:
            raise ValueError("drafted needs hits")
        return [()] * len(lengths)
    single = "lengths" not in row
    hits = [row["hits"]] if single else row["hits"]
    drafted = None if "drafted" not in row else [row["drafted"]] if single else row["drafted"]
    for found in (hits, drafted):
        if found is not None and (not isinstance(found, list) or len(found) != len(lengths)):
            raise ValueError(f"hits and drafted must be lists, one for each of {len(lengths)} lengths")
    return [
        from_hits(_counts(own, "hits"), length, None if drafted is None else _counts(drafted[place], "drafted"))
        for place, (own, length) in enumerate(zip(hits, lengths, strict=True))
    ]


def _counts(value: Any, key: str) -> list[int]:
    if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
        raise ValueError(f"{key} must be a list of whole numbers from 0")
    return value
