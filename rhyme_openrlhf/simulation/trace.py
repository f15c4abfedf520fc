"""Recorded workloads as a file, and how their samples drafted. JSON lines, one a sample, in any order within a step:

    {"step": 1, "epoch": 1, "prompt": "a1b2", "sample": 0, "prompt_tokens": 180, "length": 12, "reward": 0.5,
     "hits": [0, 3, 0, 4]}

`prompt` is any string that is the same whenever the prompt comes again; steps are numbered from 1 without gaps. Only
`step`, `epoch`, `prompt`, `prompt_tokens` and `length` are needed. `hits`: draft tokens accepted in each decode step of
the response, in order, so that they and the steps are its tokens but the first, which the prefill makes; `drafted`:
draft tokens of each of those steps (without it, as many as the live window would allow). `reward` is checked to be a
number and decides nothing; other keys are allowed. A line may also be a prompt with `lengths` (and `hits`, a list of
lists) of several samples instead of `length`, as a run's `lengths.jsonl` has them.

A sample's drafting is cut into a few parts, because the same sample drafts differently at its beginning and at its end;
within a part it is its mean. It comes from `hits`, or from which of the text came from drafts (a run's kept responses,
telemetry/samples.py).

Invariants: a wrong line is refused with the file and its number. The parts' decode steps add up to the recorded number,
to rounding, so a sample takes as many as it took.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.speculation import Rates
from rhyme_openrlhf.simulation.workload import Drafting, PromptLoad, StepLoad, Workload, WorkloadError
from rhyme_openrlhf.telemetry.run_directory import SAMPLES_FOLDER
from rhyme_openrlhf.telemetry.samples import CONTEXT, MODEL

# Parts of a response. Of more, each would be a handful of steps of the responses recorded here.
PARTS = 4
# The most that a sample that was not kept gains, by the gain of its neighbour in length.
MOST_FACTOR = 8.0


def from_hits(hits: Sequence[int], length: int, drafted: Sequence[int] | None = None) -> Drafting:
    """Return the drafting of a response of `length` tokens; `hits`: draft tokens that each decode step accepted.

    `drafted`: draft tokens of each; None: as many as the live window would allow. Raises ValueError if they do not fit.
    """
    tokens = len(hits) + sum(hits)
    if tokens != length - 1:
        raise ValueError(
            f"hits make {tokens} tokens ({len(hits)} decode steps and {sum(hits)} accepted), the response has "
            f"{length - 1} behind its first"
        )
    if drafted is None:
        drafted = _windows(hits)
    if len(drafted) != len(hits) or any(few < hit for few, hit in zip(drafted, hits, strict=False)):
        raise ValueError("drafted must have as many numbers as hits, none smaller than its hit")
    found: list[tuple[float, float, float]] = []
    at = 1.0
    for part in range(PARTS):
        begin, end = (len(hits) * edge // PARTS for edge in (part, part + 1))
        steps = end - begin
        if steps:
            gained = steps + sum(hits[begin:end])
            found.append((at if found else 0.0, gained / steps, sum(drafted[begin:end]) / steps))
            at += gained
    return tuple(found)


def _windows(hits: Sequence[int]) -> list[int]:
    """Draft tokens of each step, had the live window drafted: never fewer than were accepted."""
    window = SpeculationWindow(HistoSpecSettings())
    found = []
    for hit in hits:
        found.append(max(window.size, hit))
        window.record(found[-1], hit)
    return found


def from_record(record: dict[str, Any]) -> Drafting:
    """Return the drafting of a kept response; empty if nothing was noted of its drafts.

    Where in the response a piece lies is known in characters: tokens are taken to be spread evenly over them.
    """
    tokens, drafted = record["tokens"], record["drafted"]
    pieces = [(source, len(text)) for source, text in record["pieces"] if source != CONTEXT]
    characters = sum(size for _, size in pieces)
    if drafted is None or record["cut"] or not characters or tokens < 2:
        return ()
    steps = max(tokens - record["accepted"] - 1, 1)
    # Characters of each part that the model sampled itself: one decode step a token.
    own = [0.0] * PARTS
    at = 0
    for source, size in pieces:
        if source == MODEL:
            for part in range(PARTS):
                begin, end = characters * part / PARTS, characters * (part + 1) / PARTS
                own[part] += max(min(at + size, end) - max(at, begin), 0.0)
        at += size
    sampled = sum(own)
    if not sampled:
        return ((0.0, (tokens - 1) / steps, drafted / steps),)
    found = []
    for part in range(PARTS):
        # At least a step: an accepted draft ends with a token of the model's own.
        part_steps = max(steps * own[part] / sampled, 0.25)
        found.append((tokens * part / PARTS, max(tokens / PARTS / part_steps, 1.0), drafted / steps))
    return tuple(found)


def kept_responses(directory: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """Read the kept responses of a run directory, by step and prompt key."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted((directory / SAMPLES_FOLDER).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["step"], record["group"]].append(record)
    return found


def drafting_of_step(
    prompts: Sequence[PromptLoad], keys: Sequence[str], kept: Mapping[str, Sequence[dict[str, Any]]], rates: Rates
) -> tuple[PromptLoad, ...]:
    """Return the prompts of a step with the drafting of each of their samples.

    `keys`: of each prompt; `kept`: the step's kept responses by key; `rates`: of the whole step. A response that was
    not kept drafts as the kept one nearest in length; those are scaled so that the step's decode steps come out right.
    """
    known = sorted(
        ((record["tokens"], drafting) for of in kept.values() for record in of if (drafting := from_record(record))),
        key=lambda pair: pair[0],
    )
    if not known:
        return tuple(prompts)
    found: list[list[Drafting]] = []
    own_steps = 0.0
    borrowed: list[tuple[int, int]] = []
    for row, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
        here: dict[int, list[Drafting]] = defaultdict(list)
        for record in kept.get(key, ()):
            here[record["tokens"]].append(from_record(record))
        found.append([])
        for place, length in enumerate(prompt.lengths):
            own = here[length].pop() if here[length] else ()
            if own:
                own_steps += _steps(own, length)
            else:
                own = _of_length(min(known, key=lambda pair: abs(pair[0] - length)), length)
                borrowed.append((row, place))
            found[row].append(own)
    tokens = sum(length - 1 for prompt in prompts for length in prompt.lengths)
    missing = tokens / rates.tokens_per_step - own_steps
    others = [(found[row][place], prompts[row].lengths[place]) for row, place in borrowed]
    by = _factor(others, missing)
    for row, place in borrowed:
        found[row][place] = _scaled(found[row][place], by)
    return tuple(replace(prompt, drafting=tuple(drafting)) for prompt, drafting in zip(prompts, found, strict=True))


def _factor(samples: Sequence[tuple[Drafting, int]], steps: float) -> float:
    """Return the factor by which these samples' gained draft tokens must grow to take `steps` decode steps in all."""
    low, high = 0.0, MOST_FACTOR
    for _ in range(30):
        middle = (low + high) / 2
        taken = sum(_steps(_scaled(drafting, middle), length) for drafting, length in samples)
        low, high = (middle, high) if taken > steps else (low, middle)
    return high


def _scaled(drafting: Drafting, by: float) -> Drafting:
    return tuple((begin, 1 + (gained - 1) * by, drafts) for begin, gained, drafts in drafting)


def _of_length(known: tuple[int, Drafting], length: int) -> Drafting:
    """Return the drafting of another response, stretched to this length."""
    tokens, drafting = known
    return tuple((begin * length / tokens, gained, drafts) for begin, gained, drafts in drafting)


def _steps(drafting: Drafting, length: int) -> float:
    """Decode steps of a response of this length."""
    ends = [part[0] for part in drafting[1:]] + [float(length)]
    return sum((end - begin) / gained for (begin, gained, _), end in zip(drafting, ends, strict=True))


@dataclass
class _Prompt:
    tokens: int
    engine: int
    data_set: str
    lengths: list[int] = field(default_factory=list)
    drafting: list[Drafting] = field(default_factory=list)


def read_trace(path: Path) -> Workload:
    """Read the workload of a trace file. Raises WorkloadError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"the trace {path} cannot be read: {error}") from error
    return parse_trace(lines, str(path))


def parse_trace(lines: Iterable[str], name: str) -> Workload:
    """Read the workload of a trace's lines; `name` for messages. Raises WorkloadError."""
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
            data_set = str(row.get("data_set", ""))
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
        load = steps[step].setdefault(prompt, _Prompt(tokens, _engine(row), data_set))
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
    return PromptLoad(number, load.tokens, tuple(load.lengths), drafting, load.engine, load.data_set)


def _whole(row: dict[str, Any], key: str, least: int = 1) -> int:
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be a whole number from {least}, got {value!r}")
    return value


def _engine(row: dict[str, Any]) -> int:
    """Return the engine where all of the row's samples began; -1 if there were several, or it is not noted."""
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
    """Return the drafting of each of the row's samples; empty where nothing was noted."""
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
