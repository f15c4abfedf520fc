"""Check: tokens a second with and without drafts, in alternating rounds on the user's prompts. Never fails.

The history is the same model's responses of one round earlier, to other random numbers. That is like an epoch later
with an unchanged policy, so the ratio is an upper bound for training. Invariants: only one engine works at a time; the
engine without speculation is the run's with --no-histospec.enable, asynchronous scheduling included where vLLM has it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rhyme_openrlhf.engine.messages import Answer, Request
from rhyme_openrlhf.history.index import Piece, build_index
from rhyme_openrlhf.telemetry import metrics
from rhyme_openrlhf.telemetry.metrics import EngineCounters
from rhyme_openrlhf.telemetry.wording import number, percent
from rhyme_openrlhf.verify.bench import Bench, Prompt, installed, need_text_prompts
from rhyme_openrlhf.verify.engines import Engine
from rhyme_openrlhf.verify.outcome import Outcome

WHAT = "speed with drafts against without"
UPPER_BOUND = "upper bound for training: the history is of the same weights"
ROUNDS = 3
# As many samples of a prompt as a run has, but not more than a few minutes allow.
MOST_SAMPLES = 8
MOST_TOKENS = 256
# A round longer than this is cut to fewer prompts: seven rounds are to stay within some minutes.
ROUND_SECONDS = 20.0


@dataclass(frozen=True)
class Round:
    """One engine's part of a round: wall seconds, and what the engine counted."""

    seconds: float
    counters: EngineCounters

    @property
    def tokens_per_second(self) -> float:
        """Response tokens per second."""
        return metrics.tokens_per_second(self.counters.response_tokens, self.seconds) or 0.0


@dataclass(frozen=True)
class Comparison:
    """Rounds of both engines; `ratio` is the median over the rounds of speculating / plain tokens a second."""

    ratio: float
    ratio_low: float
    ratio_high: float
    plain_tokens_per_second: float
    speculating_tokens_per_second: float
    tokens_per_step: float | None
    acceptance_rate: float | None
    speculation_rate: float | None
    plain_step_ms: float | None
    speculating_step_ms: float | None


def compare(plain: Sequence[Round], speculating: Sequence[Round]) -> Comparison:
    """Return the figures of alternating rounds (as many of each engine)."""
    ratios = [s.tokens_per_second / p.tokens_per_second for p, s in zip(plain, speculating, strict=True)]
    with_drafts = sum((r.counters for r in speculating), EngineCounters())
    return Comparison(
        ratio=statistics.median(ratios),
        ratio_low=min(ratios),
        ratio_high=max(ratios),
        plain_tokens_per_second=statistics.median(r.tokens_per_second for r in plain),
        speculating_tokens_per_second=statistics.median(r.tokens_per_second for r in speculating),
        tokens_per_step=metrics.tokens_per_step(with_drafts),
        acceptance_rate=metrics.acceptance_rate(with_drafts),
        speculation_rate=metrics.speculation_rate(with_drafts),
        plain_step_ms=_step_ms(plain),
        speculating_step_ms=_step_ms(speculating),
    )


def _step_ms(rounds: Sequence[Round]) -> float | None:
    """Wall milliseconds per decode step (an engine's busy seconds count asynchronous steps twice: they overlap)."""
    steps = sum(r.counters.decode_steps for r in rounds)
    return sum(r.seconds for r in rounds) * metrics.MS_PER_SECOND / steps if steps else None


def run(bench: Bench) -> Outcome:
    """Measure: a first round gives the history; then ROUNDS rounds, each engine in turn."""
    need_text_prompts(bench)
    pair = bench.run_pair()
    samples = min(bench.inputs.args.rollout.n_samples_per_prompt, MOST_SAMPLES)
    prompts = bench.inputs.prompts
    bench.say(f"first round: {len(prompts)} prompts, {samples} samples each")
    first, answers = timed(pair.plain, _requests(bench, prompts, samples, drafts=False))
    indexes = {
        _name(number): draft_index(prompt, answers[number * samples : (number + 1) * samples], bench.context)
        for number, prompt in enumerate(prompts)
    }
    if first.seconds > ROUND_SECONDS:
        prompts = prompts[: max(1, int(len(prompts) * ROUND_SECONDS / first.seconds))]
    plain, speculating = [], []
    with installed(pair.speculating, indexes):
        # Warm, as the plain engine is: the draft lookup is compiled at its first use.
        timed(pair.speculating, _requests(bench, prompts[:1], samples, drafts=True))
        for number in range(1, ROUNDS + 1):
            bench.say(f"round {number} of {ROUNDS}: {len(prompts)} prompts, {samples} samples each, both engines")
            plain.append(timed(pair.plain, _requests(bench, prompts, samples, drafts=False))[0])
            speculating.append(timed(pair.speculating, _requests(bench, prompts, samples, drafts=True))[0])
    found = compare(plain, speculating)
    figures: dict[str, Any] = dataclasses.asdict(found) | {
        "dtype": pair.plain.facts.dtype,
        "async_scheduling_without_speculation": pair.plain.facts.async_scheduling,
        "engines": pair.figures,
        "prompts": len(prompts),
        "samples_per_prompt": samples,
        "rounds": {
            "plain": [dataclasses.asdict(r) for r in plain],
            "speculating": [dataclasses.asdict(r) for r in speculating],
        },
    }
    return Outcome(WHAT, "informative", UPPER_BOUND, [*_lines(found), pair.chosen], figures)


def timed(engine: Engine, requests: Sequence[Request]) -> tuple[Round, list[Answer]]:
    """Generate all at once; how long it took, and what came."""
    before = engine.counters()
    started = time.perf_counter()
    answers = engine.answer(requests)
    seconds = time.perf_counter() - started
    return Round(seconds, engine.counters() - before), answers


def _requests(bench: Bench, prompts: Sequence[Prompt], samples: int, *, drafts: bool) -> list[Request]:
    rollout = bench.inputs.args.rollout
    return [
        Request(
            prompt.tokens,
            bench.room(prompt, min(rollout.max_new_tokens or MOST_TOKENS, MOST_TOKENS)),
            rollout.temperature,
            rollout.top_p,
            _name(number) if drafts else "",
        )
        for number, prompt in enumerate(prompts)
        for _ in range(samples)
    ]


def _name(number: int) -> str:
    return f"speed-{number}"


def draft_index(prompt: Prompt, answers: Sequence[Answer], context: int) -> Any:
    """Return the index of a prompt's answers. Their rewards are not known here, so all of them count the same."""
    return build_index([Piece(list(prompt.tokens[-context:]), list(answer.tokens), 1.0) for answer in answers])


def _lines(found: Comparison) -> list[str]:
    return [
        f"{found.ratio:.2f} times as fast ({found.ratio_low:.2f} to {found.ratio_high:.2f} over {ROUNDS} rounds): "
        f"{number(found.speculating_tokens_per_second, 0)} against {number(found.plain_tokens_per_second, 0)} tokens/s",
        f"{number(found.tokens_per_step, 2)} tokens/step, acceptance {percent(found.acceptance_rate)}, "
        f"speculation {percent(found.speculation_rate)}",
        f"{number(found.speculating_step_ms, 1)} ms per decode step against {number(found.plain_step_ms, 1)}",
    ]
