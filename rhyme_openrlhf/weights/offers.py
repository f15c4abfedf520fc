"""Weights in the streaming pipeline: brought to every node, then offered; each engine loads them by itself.

RhymeRL 4.2: weights wait in the nodes' weight buffers until a rollout worker is done with its part of a step.

Invariants:
- Publishing never waits for an engine.
- Every load is recorded, when it is known.
- A version that engines may still be asked to load is still in the node's memory. An engine that owes samples of step n
  + 2 keeps version n + 2 from being made, and a node keeps two versions.
"""

from __future__ import annotations

from typing import Any

import ray

from rhyme_openrlhf.engine_errors import EngineCoreError
from rhyme_openrlhf.engine_losses import LostEngine
from rhyme_openrlhf.telemetry.events import Note, WeightsChecked, WeightsLoaded
from rhyme_openrlhf.weights.check import WeightCheck, distance, is_suspicious, movement, suspicion
from rhyme_openrlhf.weights.stores import SOURCE
from rhyme_openrlhf.weights.sync import WeightSync


class OfferedWeightCheck(WeightCheck):
    """The checks of the first syncs where engines load when they are ready.

    The policy is queried at once, an engine when it loads; the two are compared when both are known.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._policy_at: dict[int, list[float]] = {}
        self._checked: set[int] = set()

    def before_step(self) -> None:
        """Note where the policy is before a training step."""
        if self.needs_scores:
            self._policy_scores = self._in_time(lambda: self._ask_policy(0))

    def asks(self, version: int) -> list[int]:
        """Return the tokens that engines that load `version` are to score, [] for none; the policy does, now."""
        if not self.is_due:
            return []
        self._left -= 1
        if self._policy_scores is not None:
            self._policy_at[version - 1] = self._policy_scores
        self._policy_scores = self._in_time(lambda: self._ask_policy(version))
        if self._policy_scores is None:
            return []
        self._policy_at[version] = self._policy_scores
        self._checked.add(version)
        return self._tokens.at(version)

    def after_sync(self, version: int) -> None:
        """Do nothing: engines are asked when they load."""

    def loaded(self, version: int, engine: int, loaded: Any) -> None:
        """Note that an engine has loaded a version, and compare if it was asked."""
        if version not in self._checked:
            return
        policy, before = self._policy_at[version], self._policy_at.get(loaded.replaced)
        difference = distance(loaded.after, policy)
        self._services.record(
            WeightsChecked(
                version,
                engine,
                difference,
                movement(loaded.after, loaded.before),
                None if before is None else movement(policy, before),
            ),
            SOURCE,
        )
        if is_suspicious(difference):
            self._services.record(Note("warning", suspicion(engine, difference, version)), SOURCE)


class WeightOffers(WeightSync):
    """The weight buffer as the pipeline's trainer sees it. `check` says which versions engines are asked about."""

    def __init__(self, check: OfferedWeightCheck, *args: Any) -> None:
        super().__init__(*args)
        self.check = check
        self._offered: dict[Any, tuple[int, int]] = {}

    def sync(self, version: int) -> None:
        """Publish the policy's weights as `version` and offer them to every engine; note what was loaded meanwhile."""
        self.collect()
        segments = self.bring(version)
        tokens = self.check.asks(version)
        for number, (engine, segment) in enumerate(zip(self._engines, segments, strict=True)):
            if not isinstance(engine, LostEngine):
                self._offered[engine.offer_weights.remote(segment, tokens)] = (version, number)

    def collect(self) -> None:
        """Record the loads that are done. Raises what a load failed with."""
        if not self._offered:
            return
        done, _ = ray.wait(list(self._offered), num_returns=len(self._offered), timeout=0)
        for ref in done:
            version, engine = self._offered.pop(ref)
            try:
                loaded = ray.get(ref)
            except ray.exceptions.RayActorError:
                # It is gone, or will answer the generator; what it loaded is only not recorded.
                continue
            except EngineCoreError:
                self._services.losses.look(self._engines)
                if not isinstance(self._engines[engine], LostEngine):
                    raise
                continue
            if loaded is None:  # newer ones were loaded instead
                continue
            self._services.record(WeightsLoaded(version, engine, loaded.seconds), SOURCE)
            self.check.loaded(version, engine, loaded)
