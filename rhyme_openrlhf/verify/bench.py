"""The objects that every check works on: the user's arguments and prompts, the engines, and results that two checks
share.

Invariant: a check is a module with `run(bench) -> Outcome`. It prints only by `bench.say` and writes only below
`bench.inputs.folder`. It starts only `bench.engines`, or a process that it ends itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.engine.messages import Answer, Request
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.verify.engines import Engine, EnginePair, EnginePool
from rhyme_openrlhf.verify.outcome import CheckSkipped, VerifyError

# Long enough for drafts of every window up to the default's largest (32) to be accepted some times over.
GREEDY_TOKENS = 160
# In fp32 a greedy choice between two tokens is a tie only where they are equal to the last bits.
EXACT_DTYPE = "float32"
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Prompt:
    """One of the user's prompts, as upstream builds and tokenizes it."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Inputs:
    """The user's input. `argv`: options of `rhyme train`; `folder`: for files.

    `parameters`: of the model.
    """

    argv: tuple[str, ...]
    args: SimpleNamespace
    settings: RhymeSettings
    prompts: tuple[Prompt, ...]
    parameters: int
    on_gpus: bool
    folder: Path


class Bench:
    """Shared by the checks of one `rhyme verify`."""

    def __init__(self, inputs: Inputs, say: Callable[[str], None]) -> None:
        self.inputs = inputs
        self.say = say
        self.engines = EnginePool(inputs.args, inputs.settings, inputs.on_gpus)
        self._greedy: tuple[EnginePair, list[Answer]] | None = None

    def lossless_pair(self) -> EnginePair:
        """Return the engines for checks of equality: in fp32 where two such models fit, else in the run's number
        format.
        """
        run_dtype = self.engines.run_dtype
        if self.engines.fits(self.inputs.parameters * FLOAT32_BYTES):
            try:
                return self._pair(EXACT_DTYPE)
            except VerifyError as error:
                if run_dtype == EXACT_DTYPE:
                    raise
                self.say(f"no engines in {EXACT_DTYPE}: {error}")
        return self._pair(run_dtype)

    def run_pair(self) -> EnginePair:
        """Return the engines as a run has them."""
        return self._pair(self.engines.run_dtype)

    def _pair(self, dtype: str) -> EnginePair:
        self.say(f"two engines in {dtype}")
        return self.engines.pair(dtype)

    def room(self, prompt: Prompt, most: int) -> int:
        """Response tokens that a check may ask for: `most`, or what --data.max_len leaves."""
        return min(most, self.inputs.args.data.max_len - len(prompt.tokens))

    def greedy_requests(self, histories: Sequence[str] = ()) -> list[Request]:
        """Return requests for the likeliest response to each prompt, with each prompt's history where given."""
        names = histories or [""] * len(self.inputs.prompts)
        return [
            Request(prompt.tokens, self.room(prompt, GREEDY_TOKENS), history=name)
            for prompt, name in zip(self.inputs.prompts, names, strict=True)
        ]

    def greedy_answers(self, pair: EnginePair) -> list[Answer]:
        """Return the plain engine's likeliest responses, generated once."""
        if self._greedy is None or self._greedy[0] is not pair:
            self.say(f"greedy responses to {len(self.inputs.prompts)} prompts without speculation")
            self._greedy = pair, pair.plain.answer(self.greedy_requests())
        return self._greedy[1]

    @property
    def context(self) -> int:
        """Last tokens that drafts are looked up by, as many as the run's longest prefix."""
        return self.inputs.settings.histospec.prefix_max

    def close(self) -> None:
        """End all processes that the checks started."""
        self.engines.close()


def need_text_prompts(bench: Bench) -> None:
    """Raise CheckSkipped where prompts hold images, which no check builds yet."""
    if bench.inputs.args.data.max_images_per_prompt > 0:
        raise CheckSkipped("prompts with images (--data.max_images_per_prompt) are not covered yet")


@contextmanager
def installed(engine: Engine, indexes: dict[str, Any]) -> Iterator[None]:
    """Let requests draft from histories (name -> draft index) inside a `with` block."""
    for name, index in indexes.items():
        engine.install(name, index)
    try:
        yield
    finally:
        for name in indexes:
            engine.forget(name)
