"""The counters of an engine, and the figures that are made of them.

Every figure that this project prints, stores or plots is computed here, with the definitions of docs/architecture.md
("Words"). So the command line, the API and the documentation cannot disagree.

Invariants: counters are plain sums, so those of engines and of steps add up, and the difference of two snapshots is
what happened in between. A figure is None when its denominator is 0: nothing happened, which is not the same as 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rhyme_openrlhf.telemetry import draft_sources
from rhyme_openrlhf.telemetry.draft_sources import TextSource

MS_PER_SECOND = 1000.0

# An interval whose ends are further apart than this factor is no result.
WIDEST_RESULT = 2.0
# Values differ by more than their noise beyond this many standard errors: 95 % of it.
ERRORS = 2.0
# Steps at the beginning of runs that comparisons leave out: graphs, kernels and caches are made in them.
WARM_UP = 2
# Bubble time whose writer gave no cause. Every bubble should have one, so a share under this name is a defect to find.
UNEXPLAINED = "unexplained"


class CountersError(ValueError):
    """A counter is missing or not a number; `field` is its name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"counter {field!r} {problem}")
        self.field = field


@dataclass(frozen=True)
class EngineCounters:
    """The work of one engine over some stretch of time. Counts, except those in seconds."""

    response_tokens: int = 0
    """Tokens of responses, as the trainer will see them (nothing after a stop token or the length limit)."""
    decode_tokens: int = 0
    """Response tokens that decode steps emitted: all but each sample's first, which its prefill emits."""
    decode_steps: int = 0
    """Forward passes that decoded at least one sample."""
    sample_steps: int = 0
    """Sum over the decode steps of the samples that each decoded."""
    prompt_tokens: int = 0
    """Prompt tokens that were prefilled: those found in the prefix cache do not count."""
    drafts: int = 0
    """Drafts (one sample, one decode step) with at least one token that were verified."""
    drafted: int = 0
    """Draft tokens proposed."""
    accepted: int = 0
    """Draft tokens accepted that became response tokens (accepted ones behind a stop token do not count)."""
    busy_seconds: float = 0.0
    """Time in forward passes, prefill and decode alike, with all that surrounds them."""
    draft_seconds: float = 0.0
    """The part of the busy time in which drafts were looked up."""
    finished_samples: int = 0
    accepted_siblings: int = 0
    """The accepted tokens whose drafts came from other samples of the same prompt, of the same rollout."""
    accepted_own: int = 0
    """The accepted tokens whose drafts came from the sample's own text."""
    accepted_shared: int = 0
    """The accepted tokens whose drafts came from what the responses of all prompts share. What is left of `accepted`
    is from history, or from the method of vLLM that --drafting.source names."""
    accepted_earlier: int = 0
    """The accepted tokens from history whose drafts occur in responses of earlier runs alone."""

    @property
    def engine_tokens(self) -> int:
        """`response_tokens` as a step's row calls them, whose `response_tokens` the rollout stage counts."""
        return self.response_tokens

    def __add__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(*(getattr(self, n) + getattr(other, n) for n in COUNTER_NAMES))

    def __sub__(self, other: EngineCounters) -> EngineCounters:
        return EngineCounters(*(getattr(self, n) - getattr(other, n) for n in COUNTER_NAMES))

    def to_dict(self) -> dict[str, int | float]:
        """Counter name -> value."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineCounters:
        """Build from what `to_dict` gave. Names it does not know are skipped: a newer writer.

        A counter that an older writer did not have is 0. Raises CountersError when another is missing, or when one is
        not a number of its kind.
        """
        counters: dict[str, Any] = {}
        for name in COUNTER_NAMES:
            if name not in values:
                if name in LATER:
                    continue
                raise CountersError(name, "is missing")
            counters[name] = _as_seconds(values[name], name) if name in SECONDS else _as_count(values[name], name)
        return cls(**counters)


SECONDS = ("busy_seconds", "draft_seconds")
# Not in the records of earlier versions.
LATER = ("accepted_siblings", "accepted_own", "accepted_shared", "accepted_earlier")
COUNTER_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(EngineCounters))


def _as_count(value: object, name: str) -> int:
    if type(value) is int:
        return value
    # numbers.Integral also takes NumPy's integers; bool is one too, but a truth value is never a count.
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise CountersError(name, f"must be an integer, got {value!r}")
    return int(value)


def _as_seconds(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise CountersError(name, f"must be a number, got {value!r}")
    try:
        seconds = float(value)
    except OverflowError as error:
        raise CountersError(name, "is too large for a float") from error
    if not math.isfinite(seconds):
        raise CountersError(name, f"must be finite, got {value!r}")
    return seconds


class Interval(Protocol):
    """A stretch of one engine's time (`telemetry.events.EngineInterval`); those of one engine do not overlap."""

    @property
    def state(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


@dataclass(frozen=True)
class Figure:
    """A figure of a step, declared once: its function of counters, its curve, its SQL, and what people read about it.

    `formula`: columns of a step (`api/store/record.py`), as in "(accepted - accepted_own) / engine_tokens": one minus
    others, by another one. "": it is no such ratio, and `api/store/step_figures.py` computes it.
    """

    name: str
    label: str
    formula: str
    sentence: str
    scale: float = 1.0

    @functools.cached_property
    def columns(self) -> list[str]:
        """The columns that it is made of; the last one is the denominator."""
        return re.findall(r"\w+", self.formula)

    def parts(self, column: Callable[[str], Any]) -> tuple[Any, Any]:
        """Return numerator and denominator, of numbers, arrays or columns of SQL by name."""
        *above, below = map(column, self.columns)
        value = functools.reduce(operator.sub, above)
        return value if self.scale == 1 else value * self.scale, below

    def __call__(self, counters: EngineCounters) -> float | None:
        """Return the figure of these counters."""
        return _ratio(*self.parts(functools.partial(getattr, counters)))


FIGURES: dict[str, Figure] = {}


def _figure(name: str, label: str, formula: str, sentence: str, scale: float = 1.0) -> Figure:
    return FIGURES.setdefault(name, Figure(name, label, formula, sentence, scale))


def _share_of(source: TextSource) -> Figure:
    """Return the share of the response tokens that came from drafts of a source."""
    first, *others = draft_sources.PARTS
    rest = "".join(f" - accepted_{one.name}" for one in others)
    tokens = f"(accepted{rest})" if source == first else f"accepted_{source.name}"
    words = f"Share of response tokens: {source.words}"
    return _figure(f"{source.name}_share", source.share, f"{tokens} / engine_tokens", words)


# fmt: off
speculation_rate = _figure("speculation_rate", "Speculation rate", "accepted / engine_tokens",
    "Share of response tokens that were accepted drafts")
acceptance_rate = _figure("acceptance_rate", "Acceptance rate", "accepted / drafted",
    "Share of drafted tokens that were accepted")
history_share, siblings_share, own_share, shared_share, *_ = map(_share_of, draft_sources.PARTS)
tokens_per_step = _figure("tokens_per_step", "Tokens per sample and decode step", "decode_tokens / sample_steps",
    "Tokens that one running sample gets from one decode step; 1 without speculation")
decode_step_ms = _figure("decode_step_ms", "Decode step (ms)", "busy_seconds / decode_steps",
    "Busy milliseconds of an engine per decode step, prefills and drafting included", scale=MS_PER_SECOND)
_figure("tokens_per_second", "Throughput (tokens/s)", "response_tokens / rollout_seconds",
    "Response tokens per second of rollout")
_figure("bubble_fraction", "Bubble fraction", "",
    "Share of engine time in rollouts with nothing to run; training is not counted")
_figure("drafted_per_draft", "Tokens per draft", "drafted / drafts", "Mean tokens of a draft")
_figure("drafting_share", "Share of busy time spent drafting", "draft_seconds / busy_seconds",
    "Share of the engines' busy time that looking up drafts takes")
_figure("truncated_share", "Truncated share of responses", "truncated / samples",
    "Share of responses that were cut off at the length limit")
_figure("step_seconds", "Step time (s)", "", "Seconds from the start of a step's rollout to the end of its training")
earlier_share, *_ = (_share_of(source) for source in draft_sources.CORE if source.within)
# fmt: on


def tokens_per_second(tokens: int, seconds: float) -> float | None:
    """Response tokens per second of the rollout stage, over all engines."""
    return _ratio(tokens, seconds)


def bubble_seconds(intervals: Iterable[Interval]) -> dict[str, float]:
    """Engine seconds with nothing to run, by cause.

    An engine that loads weights or switches its layout runs nothing either: its state is the cause.
    """
    seconds: dict[str, float] = {}
    for interval in intervals:
        if interval.state == "generate":
            continue
        cause = (interval.cause or UNEXPLAINED) if interval.state == "idle" else interval.state
        seconds[cause] = seconds.get(cause, 0.0) + interval.end - interval.start
    return seconds


def bubble_fraction(intervals: Iterable[Interval], engines: int, rollout_seconds: float) -> float | None:
    """Share of the engines' time in the rollout stage that is bubble, 0 to 1.

    `intervals` must be cut to the rollout stage (of `rollout_seconds`) already.
    """
    return bubble_share(sum(bubble_seconds(intervals).values()), engines, rollout_seconds)


def bubble_share(bubbles: float, engines: int, rollout_seconds: float) -> float | None:
    """`bubble_fraction` where the engine seconds of bubbles are summed already."""
    return _ratio(bubbles, engines * rollout_seconds)


class _Gain(Protocol):
    """A DraftGain, or what a reader took of one."""

    @property
    def ratio(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...

    @property
    def drafting(self) -> bool: ...

    @property
    def within(self) -> float: ...

    @property
    def intervals(self) -> int: ...

    @property
    def estimate(self) -> float: ...


@dataclass(frozen=True)
class EnginesGain:
    """The gain of drafts on all engines: the means of the engines' figures and of their intervals' ends.

    These are 0 where no engine has compared yet. `estimate`: the mean of the engines' estimates by their step times, 0
    where none is known. `without`: tokens per second of engines without speculation / of these as they run now, with
    drafts or without.
    """

    ratio: float
    low: float
    high: float
    without: float
    estimate: float = 0.0

    @property
    def is_result(self) -> bool:
        """Return whether the measurement says something: few comparisons give wide intervals."""
        return self.low > 0 and self.high <= WIDEST_RESULT * self.low

    @property
    def shows_difference(self) -> bool:
        """Return whether drafts gain or lose for sure."""
        return self.is_result and (self.low > 1 or self.high < 1)

    @property
    def text(self) -> str:
        """Return the measurement if it is a result, else the estimate, in words; "" where neither is known."""
        if self.shows_difference:
            return f"{self.ratio:.2f} times the tokens/s without (95 %: {self.low:.2f} to {self.high:.2f})"
        if self.is_result:
            return f"no difference shown: {self.low:.2f} to {self.high:.2f} times the tokens/s without (95 %)"
        if self.estimate:
            return f"about {self.estimate:.1f} times the tokens/s without, by this machine's step times"
        return ""

    @property
    def sentence(self) -> str:
        """Return `text` as a sentence; "" without one."""
        return f"Drafts: {self.text}." if self.text else ""

    @property
    def advice(self) -> str:
        """Return what to do for the next run where engines without speculation are faster, "" elsewhere."""
        if not self.is_result or self.high >= 1 or self.without <= 1:
            return ""
        return (
            f"Engines without speculation would have {self.without:.2f} times the tokens per second: give the next run "
            "--no-histospec.enable."
        )


def engines_gain(found: Collection[_Gain]) -> EnginesGain | None:
    """Return the figure of these engines, one entry for each; None without any."""
    if not found:
        return None
    estimates = [one.estimate for one in found if one.estimate]
    estimate = sum(estimates) / len(estimates) if estimates else 0.0
    measured = [one for one in found if one.intervals]
    if not measured:
        return EnginesGain(0.0, 0.0, 0.0, 1.0, estimate)
    ratio, low, high = (
        sum(getattr(one, name) for one in measured) / len(measured) for name in ("ratio", "low", "high")
    )
    # Older records do not have `within`, which is then the ratio.
    without = [(1.0 if one.drafting else one.within or one.ratio) / one.ratio for one in measured]
    return EnginesGain(ratio, low, high, sum(without) / len(without), estimate)


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
