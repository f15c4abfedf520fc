"""The configurations of a sweep: one base configuration, and options that differ between its runs. Pure.

A grid takes every combination of the listed values. A random list draws each option from its values or its range.
Both return the same for the same request: the random list depends on its seed alone.

Invariants:

- No two configurations of a sweep are equal, and there are at most `MAX_RUNS`.
- Every configuration is a checked spec (`spec.check`).
- A refusal is a `SpecError`, whose faults name the option.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rhyme_openrlhf.api.launch.schema import TypedOption, options
from rhyme_openrlhf.api.launch.spec import MAX_FAULTS, Arguments, Fault, SpecError, check, merged, normal_value
from rhyme_openrlhf.api.store.bounds import INT32, NO_NUL
from rhyme_openrlhf.settings.options import did_you_mean
from rhyme_openrlhf.settings.varied import Range, read_values

# Above any sweep that people read as one table; a grid of more is nearly always a list too many.
MAX_RUNS = 500
# A table of more options is not read.
MOST_OPTIONS = 20
# In requests: a number of draws, their seed, and values as text, with room for more than a sweep may have.
Draws = Annotated[int, Field(ge=1, le=MAX_RUNS)]
DrawSeed = Annotated[int, Field(ge=0, le=INT32)]
WrittenValues = Annotated[str, Field(max_length=5000, pattern=NO_NUL)]
# Draws per run of a random list until its options count as exhausted. Finding all of 500 equally likely
# configurations takes about 3,400 draws; this allows 50,000.
DRAWS_PER_RUN = 100

Differences = dict[str, Any]


@dataclass(frozen=True)
class Configuration:
    """A run of a sweep: the values of the options that differ, by "group.name", and all its checked arguments."""

    differences: Differences
    arguments: Arguments


def configurations(
    base: Arguments,
    values: Mapping[str, Sequence[Any] | Range | str],
    count: int | None,
    seed: int,
    roots: Sequence[Path],
) -> list[Configuration]:
    """Return the grid of `values` over `base`, or `count` draws of them. Raises SpecError.

    Values may be a text as `settings/varied.py` reads it.
    """
    read: dict[str, Sequence[Any] | Range] = {}
    for name, given in values.items():
        try:
            read[name] = read_values(given) if isinstance(given, str) else given
        except ValueError as error:
            raise SpecError([Fault(f"options.{name[:200]}", str(error))]) from error
    return grid(base, read, roots) if count is None else random_list(base, read, count, seed, roots)


def grid(base: Arguments, values: Mapping[str, Sequence[Any] | Range], roots: Sequence[Path]) -> list[Configuration]:
    """Return every combination of `values` over `base`; the last option varies fastest.

    Raises SpecError, also for a range.
    """
    if ranges := [name for name, given in values.items() if isinstance(given, Range)]:
        message = "has a range, which random draws alone can use: give a count, or list its values"
        raise SpecError([Fault(f"options.{name}", message) for name in ranges])
    lists = _checked(values)
    count = math.prod(map(len, lists.values()))
    if count > MAX_RUNS:
        raise SpecError(
            [Fault("options", f"the grid has {count} runs; a sweep has at most {MAX_RUNS}: list fewer values")]
        )
    chosen = [dict(zip(lists, combination, strict=True)) for combination in itertools.product(*lists.values())]
    return _configurations(base, chosen, roots)


def random_list(
    base: Arguments,
    values: Mapping[str, Sequence[Any] | Range],
    count: int,
    seed: int,
    roots: Sequence[Path],
) -> list[Configuration]:
    """Return `count` different draws of `values` over `base`. Raises SpecError."""
    values = _checked(values)
    if not 1 <= count <= MAX_RUNS:
        raise SpecError([Fault("count", f"must be a whole number between 1 and {MAX_RUNS}")])
    # Python promises the same sequence in every version for random() alone.
    source = random.Random(seed)
    chosen: dict[tuple[str, ...], Differences] = {}
    for _ in range(DRAWS_PER_RUN * count):
        drawn = {name: _draw(source.random(), options()[_split(name)], of) for name, of in values.items()}
        chosen.setdefault(tuple(map(repr, drawn.values())), drawn)
        if len(chosen) == count:
            return _configurations(base, list(chosen.values()), roots)
    message = f"only {len(chosen)} different runs were drawn from these values: lower the count, or add values"
    raise SpecError([Fault("count", message)])


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that differ with values in normal form. Raises SpecError with all faults."""
    if not values:
        raise SpecError([Fault("options", "name at least one option with its values")])
    faults: list[Fault] = []
    normal = {}
    for name, given in values.items():
        option = options().get(_split(name))
        if option is None:
            hint = did_you_mean(name[:200], map(".".join, options()))
            faults.append(Fault(f"options.{name[:200]}", f"there is no such option{hint}"))
        elif wrong := _wrong(option, given):
            allowed = "" if option.refused else option.allowed
            faults.append(Fault(f"options.{name}", wrong, allowed))
        else:
            normal[name] = given if isinstance(given, Range) else [normal_value(option, value) for value in given]
    if faults:
        raise SpecError(faults[:MAX_FAULTS])
    return normal


def _wrong(option: TypedOption, given: Sequence[Any] | Range) -> str | None:
    if option.refused:
        return f"cannot be given: {option.refused}"
    if option.path == "output":
        return "cannot differ in a sweep: the service gives every run directories of its own"
    if isinstance(given, Range):
        return _wrong_range(option, given)
    if not given:
        return "needs at least one value"
    for value in given:
        if wrong := option.check(value):
            return f"each value {wrong}"
    normal = [repr(normal_value(option, value)) for value in given]
    twice = next((value for value, text in zip(given, normal, strict=True) if normal.count(text) > 1), None)
    return None if twice is None else f"has the value {str(twice)[:100]!r} twice"


def _wrong_range(option: TypedOption, given: Range) -> str | None:
    if option.type not in ("int", "float") or option.items is not None:
        return "cannot have a range, because its value is not one number: list its values"
    for bound in (given.low, given.high):
        if wrong := option.check(bound):
            return f"each end of the range {wrong}"
    if given.low >= given.high:
        return "needs a range whose low end is below its high end"
    if given.scale == "log" and given.low <= 0:
        return "needs a low end above 0 for a logarithmic range"
    if not math.isfinite(given.high - given.low):
        return "needs a narrower range"
    return None


def _draw(at: float, option: TypedOption, of: Sequence[Any] | Range) -> Any:
    """Return the value at `at`, from 0 to below 1, of an option's values or range."""
    if not isinstance(of, Range):
        return of[int(at * len(of))]
    if option.type == "int" and of.scale == "linear":
        return int(of.low) + int(at * (int(of.high) - int(of.low) + 1))
    value = math.exp(_between(at, math.log(of.low), math.log(of.high))) if of.scale == "log" else None
    value = _between(at, of.low, of.high) if value is None else value
    # Rounding may leave the range by the last digit.
    value = min(max(value, of.low), of.high)
    return round(value) if option.type == "int" else float(value)


def _between(at: float, low: float, high: float) -> float:
    return low + at * (high - low)


def _configurations(base: Arguments, chosen: Iterable[Differences], roots: Sequence[Path]) -> list[Configuration]:
    """Return the checked configurations. Raises SpecError for the first that is refused, naming its differences."""
    shared = [
        Fault(
            f"arguments.{group}.{name}",
            "cannot be set in a sweep, because all its runs would write there: leave it out",
        )
        for group, values in base.items()
        for name in values
        if (option := options().get((group, name))) is not None and option.path == "output"
    ]
    if shared:
        raise SpecError(shared)
    found = []
    for differences in chosen:
        edits: Arguments = {}
        for name, value in differences.items():
            group, option_name = _split(name)
            edits.setdefault(group, {})[option_name] = value
        try:
            found.append(Configuration(differences, check(merged(base, edits), roots)))
        except SpecError as error:
            named = ", ".join(f"{name} {str(value)[:100]}" for name, value in differences.items())
            faults = [dataclasses.replace(fault, message=f"with {named}: {fault.message}") for fault in error.faults]
            raise SpecError(faults) from error
    return found


def _split(name: str) -> tuple[str, str]:
    group, _, option_name = name.partition(".")
    return group, option_name
