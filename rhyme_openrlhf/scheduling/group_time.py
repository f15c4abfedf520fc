"""tau(l, dp): how long some engines take for a rank group, from the latency model (RhymeRL 6.4; speculation included).

All samples of the rank group are taken to have its mean length, as the paper does. An engine with more samples than it
runs at once takes them one after another, without gaps.

Invariant: more engines never take longer, as long as a step of more samples does not take less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# Seconds of a decode step of (samples, tokens of context in all, draft tokens in all): `Predictor.step_seconds`.
StepSeconds = Callable[[int, int, int], float]


@dataclass(frozen=True)
class Speculation:
    """What speculation gives at present: response tokens and draft tokens, per sample and decode step."""

    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0


@dataclass(frozen=True)
class GroupTime:
    """tau of the rank groups of one step. Call it with (mean length, engines); seconds.

    `samples`: of a rank group, over all its engines; `prompt_tokens`: of a prompt, in the mean; `most_running`: samples
    that an engine runs at once.
    """

    step_seconds: StepSeconds
    samples: int
    prompt_tokens: float
    most_running: int
    speculation: Speculation = Speculation()

    def __call__(self, mean_length: float, engines: int) -> float:
        each = math.ceil(self.samples / engines)
        running = min(each, self.most_running)
        # Step times are nearly linear in the context: the middle of the response stands for all of it.
        context = round(running * (self.prompt_tokens + mean_length / 2))
        drafts = round(running * self.speculation.drafts_per_step)
        steps = mean_length / self.speculation.tokens_per_step * each / running
        return steps * self.step_seconds(running, context, drafts)
