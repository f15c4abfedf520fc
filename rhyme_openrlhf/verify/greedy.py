"""Check: greedy output is the same, token for token, with and without speculation, for any history.

In fp32 equality is required. In the run's own 16-bit format two tokens can be so close that batching alone decides. So
there a difference is reported, not failed. Invariant: a history of which no draft was verified proves nothing and
fails the check.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from rhyme_openrlhf.engine.messages import Answer
from rhyme_openrlhf.history.index import build_index
from rhyme_openrlhf.proof.histories import KINDS, history
from rhyme_openrlhf.telemetry.metrics import EngineCounters, acceptance_rate
from rhyme_openrlhf.telemetry.wording import percent
from rhyme_openrlhf.verify.bench import EXACT_DTYPE, Bench, installed, need_text_prompts
from rhyme_openrlhf.verify.outcome import CheckSkipped, Outcome, Result

WHAT = "greedy output with drafts = without"
PROVES = "lossless-greedy"
# The first token comes from prefill, and the last one is never drafted.
DRAFTABLE = 3


@dataclass(frozen=True)
class Comparison:
    """Responses with one kind of history against those of the plain engine.

    `equal_tokens` counts each response's tokens up to its first difference; `largest_gap` is the largest difference,
    over the responses, of the two log-probabilities at that place: next to nothing for a near tie.
    """

    kind: str
    responses: int
    equal_responses: int
    tokens: int
    equal_tokens: int
    largest_gap: float
    drafted: int
    accepted: int


def compare(kind: str, expected: Sequence[Answer], found: Sequence[Answer], did: EngineCounters) -> Comparison:
    """Compare the two engines' responses to the same prompts; `did`: what the speculating engine did for them."""
    equal_responses = equal_tokens = 0
    gaps = [0.0]
    for plain, speculating in zip(expected, found, strict=True):
        same = _common_start(plain.tokens, speculating.tokens)
        equal_tokens += same
        if plain.tokens == speculating.tokens:
            equal_responses += 1
        elif same < min(len(plain.tokens), len(speculating.tokens)):
            gaps.append(abs(plain.log_probs[same] - speculating.log_probs[same]))
    tokens = sum(len(answer.tokens) for answer in expected)
    return Comparison(kind, len(expected), equal_responses, tokens, equal_tokens, max(gaps), did.drafted, did.accepted)


def _common_start(left: Sequence[int], right: Sequence[int]) -> int:
    for at, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return at
    return min(len(left), len(right))


def judge(comparisons: Sequence[Comparison], dtype: str) -> tuple[Result, str]:
    """Return the result, and why if it is not "ok"."""
    for comparison in comparisons:
        if not comparison.drafted:
            return "failed", f"no draft was verified with the {comparison.kind} history, so nothing was tested"
    unequal = [comparison for comparison in comparisons if comparison.equal_responses < comparison.responses]
    if not unequal:
        return "ok", ""
    worst = min(unequal, key=lambda comparison: comparison.equal_tokens / max(comparison.tokens, 1))
    what = (
        f"{worst.responses - worst.equal_responses} of {worst.responses} responses differ with the {worst.kind} "
        f"history, by log-probabilities up to {worst.largest_gap:.2g} apart at the first difference"
    )
    if dtype == EXACT_DTYPE:
        return "failed", what
    return "informative", f"{what}; in {dtype} near ties make differences, and fp32 engines do not fit here"


def run(bench: Bench) -> Outcome:
    """Generate greedily with each kind of history."""
    need_text_prompts(bench)
    pair = bench.lossless_pair()
    expected = bench.greedy_answers(pair)
    prompts = bench.inputs.prompts
    if max(len(answer.tokens) for answer in expected) < DRAFTABLE:
        raise CheckSkipped(f"the model answers every prompt with less than {DRAFTABLE} tokens: nothing can be drafted")
    comparisons = []
    for kind in KINDS:
        bench.say(f"greedy responses with the {kind} history")
        names = [f"{kind}-{number}" for number in range(len(prompts))]
        indexes = {
            name: build_index(history(kind, prompt.tokens, answer.tokens, bench.context))
            for name, prompt, answer in zip(names, prompts, expected, strict=True)
        }
        with installed(pair.speculating, indexes):
            before = pair.speculating.counters()
            found = pair.speculating.answer(bench.greedy_requests(names))
            comparisons.append(compare(kind, expected, found, pair.speculating.counters() - before))
    dtype = pair.plain.facts.dtype
    result, why = judge(comparisons, dtype)
    lines = [f"{dtype}, {len(prompts)} prompts, {comparisons[0].tokens:,} tokens", pair.chosen]
    lines += [_line(comparison) for comparison in comparisons]
    figures = {
        "dtype": dtype,
        "engines": pair.figures,
        "histories": [dataclasses.asdict(comparison) for comparison in comparisons],
    }
    return Outcome(WHAT, result, why, lines, figures, PROVES)


def _line(comparison: Comparison) -> str:
    counters = EngineCounters(drafted=comparison.drafted, accepted=comparison.accepted)
    return (
        f"{comparison.kind}: {comparison.equal_tokens / max(comparison.tokens, 1):.1%} of tokens equal, "
        f"{comparison.drafted:,} drafted, acceptance {percent(acceptance_rate(counters))}"
    )
