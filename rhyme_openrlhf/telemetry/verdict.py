"""Is a run healthy? One sentence and a list of reasons, from figures of its newest steps. Pure.

The same words are on the run's page, in the API, in `rhyme runs show` and in webhooks.

Invariants:
- A reward rises or falls, and drafts gain, by more than the noise of the steps. Else it is level, or no difference is
  shown.
- All figures are of the same newest steps, WINDOW at most.
- A run is "broken" where it ended without success, "look" where something needs a person (an error that it went on
  from among them), and "healthy" otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rhyme_openrlhf.telemetry import wording
from rhyme_openrlhf.telemetry.metrics import ERRORS, EnginesGain, bubble_share

Level = Literal["healthy", "look", "broken"]
# The page of a run that shows a reason; "": the overview itself.
Where = Literal["", "learning", "speculation", "timeline", "events", "logs", "config"]

# Steps whose figures are said, and as many before them that a change is against: enough to average out single steps,
# few enough to be recent.
WINDOW = 10
# Fewer steps on each side have no noise to compare a change with.
FEWEST = 2
# Idle engines are worth a look from this share of the rollouts on: no setting of ours leaves more when it fits.
BUBBLES = 0.3
# Most samples that the length limit may cut before rewards are of something else than what was asked.
TRUNCATED = 0.5
# A sentence is one line. The whole message is in the list of reasons.
MESSAGE = 160
BROKEN = ("failed", "crashed", "lost")
_CAUSES = {
    "tail": "the tail", "weights": "waits for the first request", "sync": "loading weights",
    "switch": "layout switches", "trainer": "waits for the trainer", "unexplained": "unexplained waits",
}  # fmt: skip


@dataclass(frozen=True)
class Health:
    """Figures and texts of a run. Lists are of a run's newest steps, the oldest first.

    `doing`: its phases, such as "generating"; `rewards`: of 2 WINDOW steps at most, finite; `bubble_seconds` by cause,
    of `engine_seconds` in the rollouts of WINDOW steps; `truncated`: the share of their samples that ran into the
    length limit; `warnings` and `errors`: the texts of notes, each once; `lost_events`: that never arrived here.
    """

    status: str
    message: str = ""
    step: int = 0
    steps_total: int | None = None
    doing: Sequence[str] = ()
    rewards: Sequence[float] = ()
    gain: EnginesGain | None = None
    bubble_seconds: Mapping[str, float] = field(default_factory=dict)
    engine_seconds: float = 0.0
    truncated: float | None = None
    warnings: Sequence[str] = ()
    errors: Sequence[str] = ()
    lost_events: int = 0


@dataclass(frozen=True)
class Reason:
    """Something that a person should look at, and the page of the run that shows it."""

    level: Level
    text: str
    where: Where


@dataclass(frozen=True)
class Part:
    """A sentence of the verdict, and the page of the run that shows more."""

    text: str
    where: Where


@dataclass(frozen=True)
class Verdict:
    """The level of a run's health, sentences with its figures, and reasons to look."""

    level: Level
    parts: tuple[Part, ...]
    reasons: tuple[Reason, ...]

    @property
    def text(self) -> str:
        """Return all sentences in one line."""
        return " ".join(part.text for part in self.parts)


@dataclass(frozen=True)
class Change:
    """The mean of the newest `steps` values less that of as many before. `shown`: it is beyond their noise."""

    by: float
    steps: int
    mean: float
    shown: bool


def verdict(health: Health) -> Verdict:
    """Return the verdict of a run."""
    change = change_of(health.rewards)
    reasons = tuple(_reasons(health, change))
    level: Level = "broken" if health.status in BROKEN else "look" if reasons else "healthy"
    said = (
        _doing(health), _reward(health.rewards, change), _gain(health.gain), _bubbles(health),
        *_counts(health),
    )  # fmt: skip
    return Verdict(level, tuple(part for part in said if part is not None), reasons)


def change_of(values: Sequence[float]) -> Change | None:
    """Return the change over the newest WINDOW values, or over the newer half of fewer than twice as many.

    None with fewer than 2 FEWEST values. Its noise is the standard error of the difference of the two means.
    """
    known = values[-2 * WINDOW :]
    half = len(known) // 2
    if half < FEWEST:
        return None
    before, after = known[-2 * half : -half], known[-half:]
    error = math.sqrt((statistics.variance(before) + statistics.variance(after)) / half)
    mean = statistics.fmean(after)
    by = mean - statistics.fmean(before)
    return Change(by, half, mean, abs(by) > ERRORS * error)


def _doing(health: Health) -> Part:
    steps = f"{health.step}" if health.steps_total is None else f"{health.step} of {health.steps_total}"
    if health.status in BROKEN:
        reason = f": {_line(health.message)}" if health.message else ""
        return Part(_ended(f"{health.status.capitalize()} after step {steps}{reason}"), "logs")
    if health.status in ("succeeded", "stopped"):
        return Part(f"{health.status.capitalize()} after step {steps}.", "")
    if not health.step:
        doing = " and ".join(health.doing) or health.status
        return Part(f"{doing[:1].upper()}{doing[1:]}.", "")
    doing = " and ".join(health.doing) or health.status
    return Part(f"Step {steps}, {doing}.", "")


def _reward(rewards: Sequence[float], change: Change | None) -> Part | None:
    if change is None:
        return Part(f"Reward {_figure(rewards[-1])}.", "learning") if rewards else None
    if not change.shown:
        return Part(f"Reward level at {_figure(change.mean)} in {change.steps} steps.", "learning")
    direction = "rises" if change.by > 0 else "falls"
    return Part(f"Reward {direction} ({change.by:+.2g} in {change.steps} steps).", "learning")


def _gain(gain: EnginesGain | None) -> Part | None:
    said = "" if gain is None else gain.sentence
    return Part(said, "speculation") if said else None


def _bubbles(health: Health) -> Part | None:
    share = bubble_share(sum(health.bubble_seconds.values()), 1, health.engine_seconds)
    if share is None:
        return None
    most = max(health.bubble_seconds, key=lambda cause: health.bubble_seconds[cause], default="")
    where = f", most in {_CAUSES.get(most, most)}" if share >= 0.01 and health.bubble_seconds[most] > 0 else ""
    return Part(f"Bubbles {share:.0%}{where}.", "timeline")


def _counts(health: Health) -> list[Part]:
    found = (("error", health.errors), ("warning", health.warnings))
    return [Part(f"{wording.counted(len(texts), name)}.", "events") for name, texts in found if texts]


def _reasons(health: Health, change: Change | None) -> list[Reason]:
    found: list[Reason] = []
    if health.status in BROKEN:
        found.append(Reason("broken", health.message or f"the run has {health.status}", "logs"))
    found += [Reason("broken" if health.status in BROKEN else "look", text, "events") for text in health.errors]
    if change is not None and change.shown and change.by < 0:
        text = f"The reward falls: {change.by:+.2g} in {change.steps} steps, to {_figure(change.mean)}"
        found.append(Reason("look", text, "learning"))
    if health.truncated is not None and health.truncated > TRUNCATED:
        text = f"{health.truncated:.0%} of the samples run into the length limit"
        found.append(Reason("look", text, "learning"))
    if health.gain is not None and health.gain.is_result and health.gain.high < 1:
        advice = f". {health.gain.advice}" if health.gain.advice else ""
        found.append(Reason("look", f"Drafts make it slower: {health.gain.text}{advice}", "speculation"))
    share = bubble_share(sum(health.bubble_seconds.values()), 1, health.engine_seconds)
    if share is not None and share > BUBBLES:
        found.append(Reason("look", f"Engines have nothing to run for {share:.0%} of the rollouts", "timeline"))
    if health.lost_events:
        text = f"{wording.counted(health.lost_events, 'event')} never arrived here"
        found.append(Reason("look", text, "events"))
    return found + [Reason("look", text, "events") for text in health.warnings]


def _figure(value: float) -> str:
    return f"{value:.3g}"


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE else f"{line[: MESSAGE - 1]}…"


def _ended(text: str) -> str:
    return text if text.endswith((".", "…", "!", "?")) else f"{text}."
