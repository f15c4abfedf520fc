"""What is noted of each request of a sample while it is generated. Plain objects: they travel with the response.

A sample of a single-turn task has one round; of a conversation, one an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Where a response (a dictionary of OpenRLHF's) and an experience of it (an attribute) keep the sample's rounds.
ROUNDS = "rhyme_rounds"


@dataclass
class Round:
    """One request: `engine` ran it, begun with `weight_version` behind `context` tokens (prompt and earlier rounds).

    `trace` is the name under which the scheduler notes its drafts, "" if it does not. `spans`: which of its response
    tokens came from accepted drafts, as (first, end, source); None: not noted.
    """

    engine: int
    weight_version: int
    context: int
    trace: str = ""
    tokens: int = 0
    last_weight_version: int = 0
    finish_reason: str = ""
    drafted: int | None = None
    spans: list[tuple[int, int, str]] | None = field(default=None)
    loads: list[tuple[int, int]] = field(default_factory=list)
    """Weights loaded while it was generated, as far as that is noted: (version, its response tokens until then)."""

    def end(self, weight_version: int, completion: Any) -> None:
        """The request is finished: `completion` is vLLM's (token_ids, finish_reason), begun maybe in older weights."""
        self.tokens = len(completion.token_ids)
        self.last_weight_version = weight_version
        self.finish_reason = completion.finish_reason or ""

    def tokens_by_version(self) -> dict[int, int]:
        """Its response tokens by the weights that generated them."""
        found, before = {}, 0
        version = self.weight_version
        for newer, tokens in (*self.loads, (self.last_weight_version, self.tokens)):
            found[version] = tokens - before
            version, before = newer, tokens
        return found
