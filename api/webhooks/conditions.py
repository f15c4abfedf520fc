"""Conditions of running runs that webhooks are about: stalled, reward fell, engines idle.

They are looked for beside the ingestion, so no batch waits for them. Every service looks by itself, and a message's key
keeps it from being stored twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import case, func, select
from sqlalchemy.orm import Session, selectinload

from rhyme_openrlhf.api.read.curve_points import read_points
from rhyme_openrlhf.api.store.bounds import INT32
from rhyme_openrlhf.api.store.curve_blocks import Points
from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Attempt, Run, Webhook, WebhookDelivery
from rhyme_openrlhf.api.store.record import RawEvent
from rhyme_openrlhf.api.store.webhooks import content_of, enqueue, is_active
from rhyme_openrlhf.settings.control import WEBHOOK_LIMITS
from rhyme_openrlhf.telemetry.events import EVENT_CLASSES, RolloutProgress

# Steps whose mean is compared: fewer would follow the noise of single batches, more would notice late.
WINDOW = 5
# Of RolloutProgress, which a clock causes, the tokens count.
WORK = tuple(kind.kind for kind in EVENT_CLASSES if kind.progress and kind is not RolloutProgress)


@dataclass(frozen=True)
class Measured:
    """The value of a condition, which a limit may be below. `key`: what makes it another one; `text`: for people."""

    value: float
    key: str
    text: str


@dataclass
class _Watch:
    """An attempt as this service saw it: its newest event, tokens of its rollout, and when something was new."""

    event: int
    since: float
    tokens: int | None = None
    step: int = -1


def reward_fall(rewards: Points) -> tuple[float, float, int] | None:
    """Return the best mean of WINDOW steps in a row, the newest one, and the best one's last step."""
    known = ~np.isnan(rewards.values)
    means = _means(rewards.values[known])
    if not len(means):
        return None
    best = int(means.argmax())
    return float(means[best]), float(means[-1]), int(rewards.steps[known][best + WINDOW - 1])


def idle_percent(shares: Points) -> float | None:
    """Return the percentage of the rollouts of the newest WINDOW steps in which engines were idle."""
    means = _means(shares.values[~np.isnan(shares.values)])
    return 100 * float(means[-1]) if len(means) else None


def _means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.convolve(values, np.full(WINDOW, 1 / WINDOW), "valid") if len(values) >= WINDOW else values[:0]


class Conditions:
    """The conditions of all running runs; used by one thread at a time. `clock` is monotonic."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._watches: dict[str, _Watch] = {}

    def check(self) -> None:
        """Look at all running runs, and store a message for each condition and webhook that has none."""
        found: dict[tuple[int, str], tuple[Webhook, dict[str, Any]]] = {}
        with self._database.reading() as session:
            active = session.scalars(select(Webhook).where(is_active(time.time())))
            webhooks = [one for one in active if WEBHOOK_LIMITS.keys() & one.events]
            running = _running(session) if webhooks else []
            self._watches = {uid: watch for uid, watch in self._watches.items() if uid in {a.uid for _, a in running}}
            for run, attempt in running:
                for event, one in self._measure(session, run, attempt):
                    for webhook in webhooks:
                        limit = getattr(webhook, WEBHOOK_LIMITS[event].field)
                        if event in webhook.events and one.value > limit:
                            figures = {"value": one.value, "limit": limit}
                            content = content_of(webhook, event, time.time(), one.text, run, **figures)
                            found[webhook.id, f"{attempt.uid}_{one.key}"] = webhook, content
            stored = select(WebhookDelivery.webhook_id, WebhookDelivery.key)
            stored = stored.where(WebhookDelivery.key.in_({key for _, key in found}))
            for known in session.execute(stored).tuples():
                found.pop(known, None)
        if found:
            with self._database.writing() as session:
                there = set(session.scalars(select(Webhook.id)))
                for (number, key), (webhook, content) in found.items():
                    if number in there:
                        enqueue(session, webhook, key, content)

    def _measure(self, session: Session, run: Run, attempt: Attempt) -> Iterator[tuple[str, Measured]]:
        """Yield what can be said of a run; its curves are read only after a new step."""
        watch = self._watched(session, run, attempt)
        minutes = (self._clock() - watch.since) / 60
        text = f"Run “{run.name}” has done nothing for {minutes:.0f} minutes, after step {run.step}"
        yield "stalled", Measured(minutes, f"stalled_{run.step}", text)
        if watch.step == run.step:
            return
        watch.step = run.step
        curves = read_points(session, run.uid, ["reward", "bubble_fraction"], 0, INT32)
        if (fall := reward_fall(curves["reward"])) is not None:
            best, now, at = fall
            text = f"The reward of run “{run.name}” fell from {best:.4g} (step {at}) to {now:.4g} (step {run.step})"
            yield "reward_fell", Measured(best - now, f"reward_{at}", f"{text}, as means of {WINDOW} steps")
        if (idle := idle_percent(curves["bubble_fraction"])) is not None:
            text = f"Engines of run “{run.name}” were idle for {idle:.0f} % of the last {WINDOW} rollouts"
            yield "engine_idle", Measured(idle, "idle", f"{text}, up to step {run.step}")

    def _watched(self, session: Session, run: Run, attempt: Attempt) -> _Watch:
        """Return the attempt's watch after a look at its new events.

        The time without anything new is measured by this service's clock, from its first look on. So neither a wrong
        clock of a run's machine nor a restart of the service makes a run stalled.
        """
        watch = self._watches.get(attempt.uid)
        if watch is None:
            newest = session.scalar(select(func.max(RawEvent.id)).where(RawEvent.run_id == run.id))
            watch = self._watches[attempt.uid] = _Watch(newest or 0, self._clock())
            return watch
        last, work, progress = session.execute(
            select(
                func.max(RawEvent.id),
                func.max(case((RawEvent.kind.in_(WORK), RawEvent.id))),
                func.max(case((RawEvent.kind == RolloutProgress.kind, RawEvent.id))),
            ).where(RawEvent.run_id == run.id, RawEvent.id > watch.event)
        ).one()
        watch.event = last or watch.event
        row = session.get(RawEvent, progress) if progress is not None else None
        tokens = watch.tokens if row is None else row.content().get("response_tokens")
        if work is not None or tokens != watch.tokens:
            watch.since = self._clock()
        watch.tokens = tokens
        return watch


def _running(session: Session) -> list[tuple[Run, Attempt]]:
    """Return the running runs with their newest attempts."""
    query = select(Run).where(Run.status == "running").options(selectinload(Run.attempts))
    return [(run, run.attempts[-1]) for run in session.scalars(query)]
