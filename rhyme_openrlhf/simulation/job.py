"""A sample on its way through simulated engines.

Invariant: what it has generated never falls, and never exceeds its length.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Job:
    """A sample on its way. `length`: tokens its response will have; `generated`: so far.

    `tokens_per_step`, `drafts_per_step`: what speculation gives it with a full window. `later`: from which token of the
    response on it gives something else, ascending; (token, tokens per step, drafts per step) each.
    """

    sample: int
    prompt: int
    prompt_tokens: int
    length: int
    tokens_per_step: float = 1.0
    drafts_per_step: float = 0.0
    generated: float = 0.0
    later: tuple[tuple[float, float, float], ...] = ()
    # A sample that is moved or was preempted is computed again with all its tokens; one that is sent is not.
    computed: bool = False

    @property
    def context(self) -> float:
        return self.prompt_tokens + self.generated

    @property
    def pause(self) -> float:
        """The token with which its end, or another pace, comes."""
        return self.later[0][0] if self.later else float(self.length)

    def next_pace(self) -> bool:
        """Go on as it does behind its pause; False: there is nothing behind it."""
        if not self.later or self.generated >= self.length:
            return False
        (_, self.tokens_per_step, self.drafts_per_step), *rest = self.later
        self.later = tuple(rest)
        return True
