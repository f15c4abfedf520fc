"""Messages that travel with a sample, and the data that its requests bring to an engine. Plain objects without vLLM.

Invariant: `SampleRequest` never changes while a sample lives, on any engine; everything that grew since is in
`Progress`. So an engine needs these two and nothing of the engine before it.
"""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.proof.judgement import Difference
from rhyme_openrlhf.telemetry.metrics import EngineCounters

# Key of vLLM's `SamplingParams.extra_args` under which a request brings what it has generated elsewhere: `Arrival`.
ARRIVED = "rhyme_arrived"
# Where an output keeps the weights that were loaded below its sample, as `samples.Round.loads`.
LOADS = "rhyme_loads"


@dataclass(frozen=True)
class Packed:
    """An object on its way through a process that passes it on: its sender has pickled it, its reader unpacks it."""

    pickled: bytes


def unpacked(value: Any) -> Any:
    """Return what a `Packed` holds, or the value itself if it came without crossing a process."""
    return pickle.loads(value.pickled) if isinstance(value, Packed) else value


@dataclass(frozen=True)
class SampleRequest:
    """A request for a whole response, with vLLM's sampling parameters as its caller gave them.

    `history`: the prompt whose draft index it may draft from (prompt_keys.py::prompt_key), None: none; `round`: which
    round of a conversation it is. `multi_modal`: as OpenRLHF passes it. `group`: in a pipelined run, the number of its
    step's turn and its prompt's place in the step.
    """

    prompt: tuple[int, ...]
    parameters: Any
    history: str | None = None
    round: int = 0
    multi_modal: Any = None
    group: tuple[int, int] | None = None

    @property
    def longest(self) -> int:
        """The most tokens the sample can come to have, prompt included."""
        return len(self.prompt) + (self.parameters.max_tokens or 0)


@dataclass(frozen=True)
class Progress:
    """A sample's generated part: its response tokens, and vLLM's log-probabilities of them (None: not asked for).

    `generator`: the state of its seeded random number generator after them, None if it has none; `window`: the size of
    its speculation window; `weight_version`: the only one that may go on with it, None: any.
    """

    tokens: tuple[int, ...] = ()
    log_probs: Any = None
    generator: bytes | None = None
    window: int | None = None
    weight_version: int | None = None


@dataclass(frozen=True)
class Arrival:
    """A message to an engine's scheduler and worker about a sample that ran elsewhere.

    `room`: the reservation it takes up ("": none); `computed`: of how many tokens the KV cache is in it. `buffer`: it
    is to come by a handover in this buffer, whose rows from `first` on are then to be copied in; None: it has come.
    `convoy`: it goes on together with all that are expected under this name, "": by itself.
    """

    tokens: tuple[int, ...]
    room: str = ""
    computed: int = 0
    generator: bytes | None = None
    buffer: dict[str, Any] | None = None
    first: int = 0
    convoy: str = ""

    def to_plain(self) -> dict[str, Any]:
        """Return the fields for `extra_args`, which travel as msgpack."""
        return {**dataclasses.asdict(self), "tokens": list(self.tokens)}

    @classmethod
    def of(cls, parameters: Any) -> Arrival | None:
        """Return the message in a request's sampling parameters (or None); None for a sample that begins here."""
        plain = ((parameters.extra_args if parameters else None) or {}).get(ARRIVED)
        return None if plain is None else cls(**{**plain, "tokens": tuple(plain["tokens"])})


@dataclass(frozen=True)
class Exported:
    """The number of a running sample's blocks that were copied: those that were full and final. `problem`: why not, or
    "".
    """

    blocks: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Stopped:
    """A sample that its engine keeps, stopped: what it has generated, and its KV cache as far as it is computed.

    `blocks`: how many hold its first `computed` tokens, the last of which may be partly filled. `problem`: why what was
    to be carried of them was not copied, "" if it was. `age`: seconds from the stop to this answer.
    """

    progress: Progress
    computed: int
    blocks: int
    problem: str = ""
    age: float = 0.0


@dataclass(frozen=True)
class Rest:
    """Blocks that a sample's engine has still to copy in when it starts there: rows `first` to `end` of a buffer."""

    buffer: Any
    first: int
    end: int


@dataclass(frozen=True)
class Started:
    """An engine's answer to the order to go on with a sample. `refused`: why it does not, "" if it does.

    `not_carried`: why it computes the KV cache again that was to be carried; "" if it need not. `weight_version`: the
    engine's, with which a sample goes on that is not refused.
    """

    refused: str = ""
    not_carried: str = ""
    weight_version: int = 0


@dataclass(frozen=True)
class Grown:
    """Response tokens of a sample from number `first` on, with vLLM's log-probabilities (None: not asked for)."""

    first: int
    tokens: tuple[int, ...]
    log_probs: Any = None


@dataclass(frozen=True)
class News:
    """An engine's news of its samples, by place.

    `finished`: vLLM's output, or the exception that ended it; `grown`: what came since the last news; then the engine's
    weight version, and whether it takes part in moves now. `number`: of the news, from 1 on.
    """

    finished: dict[str, Any]
    grown: dict[str, Grown]
    weight_version: int
    open: bool
    number: int = 0

    def __reduce__(self) -> tuple[Any, ...]:
        # The samples' home passes outputs on. To unpickle each one there would take it a microsecond a token.
        finished = {
            place: one if isinstance(one, BaseException) else Packed(pickle.dumps(one))
            for place, one in self.finished.items()
        }
        return News, (finished, self.grown, self.weight_version, self.open, self.number)


# --- turns of the streaming pipeline


@dataclass(frozen=True)
class RunningSamples:
    """The samples that an engine generates, and its turn.

    `turn`: the turn's number (-1 before the first). Each sample: the number of its step's turn, its prompt's place in
    the step, its response tokens so far, and its number where it can move. `free_tokens`: of KV cache; 0 where samples
    cannot move.
    """

    turn: int
    samples: list[tuple[int, int, int, int]]
    weight_version: int = 0
    free_tokens: int = 0


@dataclass(frozen=True)
class TurnReport:
    """One turn's work of an engine; `decisions` and `gain` as in `RhymeRolloutActor.rollout_report`."""

    weight_version: int
    counters: EngineCounters
    decisions: dict[str, Any] = field(default_factory=dict)
    gain: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Loaded:
    """An engine has loaded offered weights: `seconds` it took; `before` and `after` are the log-probabilities of the
    sequence it was asked to score, or None; `replaced` is the version it had."""

    seconds: float
    replaced: int
    before: list[float] | None
    after: list[float] | None


# --- requests in token ids


@dataclass(frozen=True)
class Request:
    """One sample to generate. `history` names the installed history it may draft from ("": none).

    Without a seed of its own: vLLM 0.29.0's CPU build dies of a seeded request whose prefill is cut in two.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    history: str = ""


@dataclass(frozen=True)
class Answer:
    """The tokens that came, and the model's log-probability of each."""

    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]

    @classmethod
    def of(cls, completion: Any) -> Answer:
        """Return vLLM's completion as an answer; its log-probabilities were asked for."""
        tokens = tuple(completion.token_ids)
        return cls(tokens, tuple(at[token].logprob for token, at in zip(tokens, completion.logprobs, strict=True)))


@dataclass(frozen=True)
class Proof:
    """An engine's findings about its drafts. `problem`: a clause that says what they change, "" for nothing.

    `by_batch_size`, `by_kind`: differences of log-probabilities from one row a sample, by other batch sizes, and by
    drafts of each kind of history. `p_values`: of sampled tokens, by kind of draft.
    """

    problem: str
    by_batch_size: Difference
    by_kind: dict[str, Difference]
    p_values: dict[str, float]
    drafted: int
    accepted: int
    seconds: float


@dataclass(frozen=True)
class Said:
    """An engine's sentence on its drafts at its start, and whether it drafts."""

    drafts: bool
    text: str
