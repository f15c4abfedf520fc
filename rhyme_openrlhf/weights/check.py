"""Did a weight sync arrive? Compares a sequence's log-probabilities in every engine with the policy's.

Agreement alone does not tell: a step changes the weights little, so an engine that kept its old weights agrees too.
Hence also how far engine and policy moved since before the step; `verify/weights.py` judges these figures.

The sequence begins with the same tokens at every check, so movements can be told. Its other tokens differ from check to
check: they go through the vocabulary in an order drawn from the run's seed, and begin again when each had its turn.

- One stale row among V of the embedding is an input of one of n checks with probability min(1, n * SAMPLED_TOKENS / V).
  For V = 151,669 this is 0.03 % after one check, 3.4 % after 100, and 1 after 2,917.
- An expert that takes a share p of the tokens is unseen by n checks with probability (1 - p) ** (64 n). With 8 of 128
  experts a token, this is 1.6 % after one check.
- Tokens that a tokenizer adds to its own (special ones, and those of images) are left out.

Engines with samples answer between two decode steps, before samples that wait (`engine/requests.py`, `scored`).

Invariants: works for every weight transport; done for the first `--weights.check_syncs` syncs and then costs nothing;
`before_step` and `after_sync` are called while the engines are awake and not paused (a paused engine never answers). A
check that takes too long is left out with a warning; it never ends the run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray

from rhyme_openrlhf.engine_errors import last_line
from rhyme_openrlhf.telemetry.events import Note, WeightsChecked
from rhyme_openrlhf.telemetry.services import RunServices
from rhyme_openrlhf.weights.stores import SOURCE, WeightSyncError, wait_for

Asked = TypeVar("Asked")
# Any tokens do, as long as every model has them: vocabularies hold at least a few dozen.
FIXED_TOKENS = [5, 11, 7, 23, 9, 14, 6, 19, 10, 8, 21, 12]
# Few, because logits of a check are [tokens, vocabulary] in memory that neither an engine nor a policy reserves for it.
SAMPLED_TOKENS = 52
# Two right implementations of a large model in bf16 differ by some hundredths; a wrong weight by whole units.
SUSPICIOUS_DIFFERENCE = 0.5


class CheckedTokens:
    """The sequence of each check of a run. `ordinary`: tokens that may be in it; `longest`: its greatest length."""

    def __init__(self, ordinary: Sequence[int], seed: int, longest: int) -> None:
        self._order = sorted(ordinary)
        random.Random(seed).shuffle(self._order)
        self._sampled = max(0, min(SAMPLED_TOKENS, longest - len(FIXED_TOKENS)))

    @classmethod
    def of(cls, tokenizer: Any, seed: int, longest: int) -> CheckedTokens:
        """Return the sequences of a run with this tokenizer; engines answer with a token behind `longest` - 1."""
        ordinary = set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder)
        return cls(list(ordinary), seed, longest - 1)

    def at(self, version: int) -> list[int]:
        """Return the sequence that is scored after the sync of `version`."""
        first = version * self._sampled
        sampled = [self._order[(first + n) % len(self._order)] for n in range(self._sampled) if self._order]
        return [*FIXED_TOKENS, *sampled]


class WeightCheck:
    """The checks of one run, in the order of its training steps."""

    def __init__(self, policy: Any, engines: list[Any], services: RunServices, tokens: CheckedTokens) -> None:
        self._policy = policy
        self._tokens = tokens
        self._engines = engines
        self._services = services
        self._left: int = services.settings.weights.check_syncs
        self._policy_scores: list[float] | None = None
        self._engine_scores: list[list[float] | None] = []

    @property
    def needs_scores(self) -> bool:
        """True if `before_step` has to ask the engines: a check is due and there was none before it."""
        return self._left > 0 and self._policy_scores is None

    @property
    def is_due(self) -> bool:
        """True if `after_sync` will check."""
        return self._left > 0

    def before_step(self) -> None:
        """Note where policy and engines are before a training step (known already if the last step was checked)."""
        if self.needs_scores:
            self._policy_scores, self._engine_scores = self._in_time(lambda: self._ask(0)) or (None, [])

    def after_sync(self, version: int) -> None:
        """Compare, and record how far each engine is from the policy and how far both moved."""
        if not self.is_due:
            return
        self._left -= 1
        old_policy, old_engines = self._policy_scores, self._engine_scores
        asked = self._in_time(lambda: self._ask(version))
        self._policy_scores, self._engine_scores = asked or (None, [])
        if asked is None:
            return
        policy, engines = asked
        policy_moved = None if old_policy is None else movement(policy, old_policy)
        for engine, scores in enumerate(engines):
            if scores is None:
                # Lost (engine_losses.py).
                continue
            difference = distance(scores, policy)
            old = old_engines[engine] if old_policy is not None else None
            moved = None if old is None else movement(scores, old)
            self._services.record(WeightsChecked(version, engine, difference, moved, policy_moved), SOURCE)
            if is_suspicious(difference):
                text = suspicion(engine, difference, version)
                self._services.record(Note("warning", text), SOURCE)

    def _in_time(self, ask: Callable[[], Asked]) -> Asked | None:
        """Return what `ask` returns, or None with a warning if it waited too long, or for an engine that is lost."""
        try:
            return ask()
        except (WeightSyncError, ray.exceptions.RayActorError) as error:
            self._services.record(Note("warning", f"a weight check is left out: {last_line(error)}"), SOURCE)
            return None

    def _ask(self, version: int) -> tuple[list[float], list[list[float] | None]]:
        plan = self._services.layouts
        # Of layouts that take turns only one can answer; all load the same way.
        asked = self._engines if plan is None or plan.both_awake else self._engines[: plan.engines]
        engines = wait_for(
            [engine.score.remote(self._tokens.at(version)) for engine in asked],
            self._services.settings.weights.timeout_s,
            "the engines' log-probabilities",
        )
        return self._ask_policy(version), engines

    def _ask_policy(self, version: int) -> list[float]:
        trained: list[list[float]] = wait_for(
            self._policy.async_run_method("score", self._tokens.at(version)),
            self._services.settings.weights.timeout_s,
            "the policy's log-probabilities",
        )
        return trained[0]


def is_suspicious(difference: float) -> bool:
    """Return whether an engine is too far from the policy; a difference that is not a number is."""
    return not difference <= SUSPICIOUS_DIFFERENCE


def suspicion(engine: int, difference: float, version: int) -> str:
    """Return what is said of an engine that is too far from the policy."""
    return (
        f"engine {engine} gives log-probabilities up to {difference:.3f} away from the trained model's after loading "
        f"weight version {version}: its rollouts may not follow the policy"
    )


def movement(scores: Sequence[float], before: Sequence[float]) -> float:
    """Return how far log-probabilities moved between two checks: those of the tokens that both begin with."""
    same = len(FIXED_TOKENS) - 1
    return distance(scores[:same], before[:same])


def distance(scores: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest difference of two sequences of log-probabilities; NaN if one of them is."""
    differences = [abs(a - b) for a, b in zip(scores, others, strict=True)]
    # max() drops a NaN that is not the first.
    return math.nan if any(map(math.isnan, differences)) else max(differences)
