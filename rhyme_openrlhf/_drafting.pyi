"""The compiled drafting core: arrays in, arrays out. csrc/drafter.h, index.h and budget.h say what each does."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_Int32s = NDArray[np.int32]
_Int64s = NDArray[np.int64]
_Floats = NDArray[np.float32]

NO_SAMPLE: int
SURE_MATCH: int
INSTRUCTION_SET: str

class BufferError(ValueError): ...

def build(text: ArrayLike, lengths: ArrayLike, rewards: ArrayLike, earlier: int = 0) -> NDArray[np.uint8]:
    """Return an index's buffer without its checksum: of pieces of these lengths with their separators.

    The first `earlier` pieces are of earlier runs.
    """

def flatten(lists: Sequence[Sequence[int]]) -> tuple[_Int64s, _Int32s]:
    """Return how many tokens each has, and all of them."""

def split(tokens: ArrayLike, lengths: ArrayLike) -> list[list[int]]:
    """Return the tokens as lists of these lengths."""

def cut(tokens: ArrayLike, lengths: ArrayLike, taken: ArrayLike) -> _Int32s:
    """Return the first so many tokens of each draft."""

def choose(
    acceptance: ArrayLike, lengths: ArrayLike, seconds: ArrayLike, running: int, tried: int
) -> tuple[_Int64s, int, float]:
    """Return the draft lengths that yield most tokens a second, their sum, and how many will be accepted."""

def estimate(
    sources: ArrayLike,
    matches: ArrayLike,
    recents: ArrayLike,
    lengths: ArrayLike,
    confidences: ArrayLike,
    match_edges: ArrayLike,
    recent_edges: ArrayLike,
    confidence_edges: ArrayLike,
    table: ArrayLike,
) -> tuple[_Int32s, _Floats]:
    """Return each draft token's cell in a table of acceptance, and its probability there."""

def learn(
    offered: NDArray[np.float64],
    accepted: NDArray[np.float64],
    cells: ArrayLike,
    lengths: ArrayLike,
    numbers: ArrayLike,
    verified: ArrayLike,
    hits: ArrayLike,
) -> int:
    """Count what became of drafts; returns how many of their tokens were verified."""

def make_isotonic(values: ArrayLike, weights: ArrayLike, out: _Floats) -> None:
    """Make each row of `out` the non-decreasing one nearest to that of `values`."""

class Index:
    """A draft index, whose buffer it keeps alive."""

    def __init__(self, buffer: Any) -> None: ...
    def __len__(self) -> int: ...
    def draft(
        self, text: ArrayLike, longest: int, shortest: int, limit: int, repeats: int = 1
    ) -> tuple[_Int32s, _Floats, int]:
        """Return what followed, the probability up to each token, and the match's length; benchmarks repeat it."""

    def longest_match(self, text: ArrayLike, longest: int, shortest: int) -> tuple[int, int, int]:
        """Return low, high and length of the node."""

class Cursor:
    """Where one sample is in an index."""

    def follow(self, index: Index, text: ArrayLike, longest: int, least: int) -> tuple[int, int, int, int]:
        """Return what `Index.longest_match` returns, and a place in the node."""

    def move_to(self, index: Index, place: int) -> None:
        """Expect the sample to go on as the suffix at that place."""

    @property
    def at(self) -> int: ...
    @property
    def length(self) -> int: ...

class Shared:
    """What the last `window` entered tokens share."""

    def __init__(self, window: int) -> None: ...
    def enter(self, text: ArrayLike, token: int) -> None: ...
    def guess(self, text: ArrayLike) -> tuple[int, int, float]:
        """Return the token (-1: none), how many last tokens of the text matched, and the probability."""

    @property
    def memory_bytes(self) -> int: ...

class Drafter:
    """All drafting of one engine. A sample is a number that `start` gives, or NO_SAMPLE."""

    def __init__(
        self,
        *,
        longest: int,
        shortest: int,
        siblings: bool,
        own_output: bool,
        window_start: int,
        window_step: int,
        window_max: int,
        extend_confidence: float,
        stop_confidence: float,
        shared_tokens: int,
    ) -> None: ...
    def install(self, prompt: str, index: Index) -> None: ...
    def forget(self, prompt: str) -> None: ...
    def start(self, prompt: str, tokens: ArrayLike, prompt_tokens: int, most_tokens: int, window: int) -> int: ...
    def append(self, samples: ArrayLike, counts: ArrayLike, tokens: ArrayLike) -> None: ...
    def draft(self, samples: ArrayLike, whole: bool) -> tuple[_Int64s, _Int32s, _Floats, _Int64s, _Int64s, _Int64s]:
        """Return lengths, tokens, probabilities, sources, matched tokens and recent acceptance."""

    def verified(
        self, samples: ArrayLike, verified: ArrayLike, accepted: ArrayLike
    ) -> tuple[_Int64s, _Int64s, _Int64s]:
        """Return each draft's source, its number in the last step or -1, and the accepted tokens by source."""

    def computing(self) -> None:
        """Enter what the last step's samples have written into what all prompts share, and give memory to some."""

    def window(self, sample: int) -> int: ...
    def finish(self, sample: int) -> None: ...
    @property
    def memory_bytes(self) -> int: ...
