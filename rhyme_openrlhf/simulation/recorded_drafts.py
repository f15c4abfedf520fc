"""How samples drafted, from what was recorded of each: tokens and draft tokens per decode step along a response.

A sample is cut into a few parts, because the same sample drafts differently at its beginning and at its end; within a
part it is its mean. Recorded is either what each decode step accepted (a trace's `hits`), or which of the text came
from drafts (a run's kept responses, telemetry/samples.py).

Invariant: the parts' decode steps add up to the recorded number, to rounding, so a sample takes as many as it took.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.simulation.speculation_rates import Rates
from rhyme_openrlhf.simulation.workload import Drafting, PromptLoad
from rhyme_openrlhf.telemetry.run_directory import SAMPLES_FOLDER
from rhyme_openrlhf.telemetry.samples import CONTEXT, MODEL

# Parts of a response. Of more, each would be a handful of steps of the responses recorded here.
PARTS = 4
# A sample that was not kept gains at most so many times what its neighbour in length does.
MOST_FACTOR = 8.0


def from_hits(hits: Sequence[int], length: int, drafted: Sequence[int] | None = None) -> Drafting:
    """Of a response of `length` tokens whose decode steps accepted so many draft tokens each.

    `drafted`: draft tokens of each; None: what the live window would allow. Raises ValueError if they do not fit.
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
    """Of a kept response; empty if nothing was noted of its drafts.

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
    """The kept responses of a run directory, by step and prompt key."""
    found: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted((directory / SAMPLES_FOLDER).glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["step"], record["group"]].append(record)
    return found


def drafting_of_step(
    prompts: Sequence[PromptLoad], keys: Sequence[str], kept: Mapping[str, Sequence[dict[str, Any]]], rates: Rates
) -> tuple[PromptLoad, ...]:
    """The prompts of a step with how each of their samples drafted.

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
    """By what the draft tokens that these samples gain are to be multiplied to take so many decode steps in all."""
    low, high = 0.0, MOST_FACTOR
    for _ in range(30):
        middle = (low + high) / 2
        taken = sum(_steps(_scaled(drafting, middle), length) for drafting, length in samples)
        low, high = (middle, high) if taken > steps else (low, middle)
    return high


def _scaled(drafting: Drafting, by: float) -> Drafting:
    return tuple((begin, 1 + (gained - 1) * by, drafts) for begin, gained, drafts in drafting)


def _of_length(known: tuple[int, Drafting], length: int) -> Drafting:
    """The drafting of another response, stretched to this length."""
    tokens, drafting = known
    return tuple((begin * length / tokens, gained, drafts) for begin, gained, drafts in drafting)


def _steps(drafting: Drafting, length: int) -> float:
    """Decode steps of a response of this length."""
    ends = [part[0] for part in drafting[1:]] + [float(length)]
    return sum((end - begin) / gained for (begin, gained, _), end in zip(drafting, ends, strict=True))
