"""The seeding shim: what makes two runs with the same seed sample the same tokens.

OpenRLHF 0.11.2 seeds neither the order in which its controller draws prompts nor the requests it sends to vLLM, and
it trains samples in the order in which they finish. With `--run.reproducible` this shim, the same for OpenRLHF's own
classes and ours, closes the three gaps. Without it nothing here runs, and behaviour is upstream's.
"""

from __future__ import annotations

import zlib
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SampleIdentity:
    """Which response is being generated: the `sample`-th of the `visit`-th time that `prompt` is answered.

    Visits of evaluations are negative. `rounds`: what is noted of its requests, one entry each
    (telemetry/samples.py); no part of who it is.
    """

    prompt: str
    visit: int
    sample: int
    rounds: list[Any] = field(default_factory=list, compare=False)


class VisitedPrompt(str):
    """A prompt that knows which visit it is (SampleIdentity.visit), counted where all prompts are sent from.

    An engine that counts by itself, as OpenRLHF's own classes must, knows only its own visits: with more than one
    engine, or after a resume, two visits would get the same seeds.
    """

    visit: int

    def __new__(cls, text: str, visit: int) -> VisitedPrompt:
        prompt = super().__new__(cls, text)
        prompt.visit = visit
        return prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return VisitedPrompt, (str(self), self.visit)


# Set around each sample's generation; a sample's own requests (one a round) run in the same asyncio context.
current_sample: ContextVar[SampleIdentity | None] = ContextVar("current_sample", default=None)


def request_seed(run_seed: int, identity: SampleIdentity, prompt_tokens: int) -> int:
    """The seed of one request; `prompt_tokens` (its length in tokens) tells the rounds of a conversation apart."""
    text = f"{run_seed}|{identity.prompt}|{identity.visit}|{identity.sample}|{prompt_tokens}"
    return zlib.crc32(text.encode())
