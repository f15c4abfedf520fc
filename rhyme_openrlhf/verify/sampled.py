"""Check: at temperature 1, sampled tokens follow the model's own distribution, with a right and an adversarial draft.

One context, sampled many times: the token that a draft proposes is compared, by chi-square, with the distribution
that the engine without speculation gives for it. Invariant: only tokens of which a draft was verified are counted,
and if drafts were not verified the check fails.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rhyme_openrlhf.engine.messages import Answer, Request
from rhyme_openrlhf.history.index import build_index
from rhyme_openrlhf.proof.chi_square import P_VALUE_FLOOR, ChiSquare, chi_square
from rhyme_openrlhf.proof.context import Context, most_telling
from rhyme_openrlhf.proof.histories import draft_of
from rhyme_openrlhf.verify.bench import Bench, Prompt, installed, need_text_prompts
from rhyme_openrlhf.verify.engines import EnginePair
from rhyme_openrlhf.verify.outcome import CheckSkipped, Outcome, Result, VerifyError

WHAT = "sampled tokens with drafts follow the model"
PROVES = "lossless-sampled"
DRAFTS = ("right", "adversarial")
HISTORY = "sampled"
SAMPLES = 3000
# With P_VALUE_FLOOR a right engine fails once in 10,000 tests; done again on failure, once in 100 million.
TRIES = 2
# The first token is prefill's, the second the draft's, and vLLM drafts only where one more may follow.
TOKENS = 3
# Samples that miss their draft are few (the last of a batch may be cut off); more means drafts do not arrive.
LEAST_DRAFTED = 0.99


@dataclass(frozen=True)
class Trial:
    """One test: `drafted` of the `counted` samples that began with the context's first token had a draft."""

    draft: str
    token: int
    drafted: int
    accepted: int
    counted: int
    test: ChiSquare


def choose_context(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> Context:
    """Choose the most telling place: many samples start with the same token, and the next one is open.

    Raises CheckSkipped when no answer has two tokens.
    """
    found = most_telling((prompt.tokens, answer) for prompt, answer in zip(prompts, answers, strict=True))
    if found is None:
        raise CheckSkipped("the model answers every prompt with a single token: nothing can be drafted")
    return found


def judge(trials: Sequence[Trial]) -> tuple[Result, str]:
    """Return the result, and why if it is not "ok". Of several trials with one draft, the last counts."""
    for trial in {trial.draft: trial for trial in trials}.values():
        if trial.drafted < LEAST_DRAFTED * trial.counted or not trial.counted:
            why = f"only {trial.drafted} of {trial.counted} samples had their {trial.draft} draft verified"
            return "failed", why
        if trial.test.p_value is None:
            return "skipped", "the model is certain of the next token wherever it was asked: nothing to compare"
        # Written so that a p-value that is NaN is a failure too.
        if not trial.test.p_value >= P_VALUE_FLOOR:
            why = f"with the {trial.draft} draft, tokens do not follow the model: p = {trial.test.p_value:.2g}, twice"
            return "failed", why
    return "ok", ""


def run(bench: Bench) -> Outcome:
    """Test both drafts; a failure is tested once more."""
    need_text_prompts(bench)
    pair = bench.lossless_pair()
    context = choose_context(bench.inputs.prompts, bench.greedy_answers(pair))
    probabilities = pair.plain.next_token_probabilities([*context.prompt, context.first])
    trials: list[Trial] = []
    for draft in DRAFTS:
        for _ in range(TRIES):
            bench.say(f"{SAMPLES:,} samples of one context, {draft} draft")
            trials.append(_try(bench, pair, context, probabilities, draft))
            p_value = trials[-1].test.p_value
            if p_value is None or p_value >= P_VALUE_FLOOR:
                break
    result, why = judge(trials)
    figures = {"samples": SAMPLES, "trials": [dataclasses.asdict(trial) for trial in trials]}
    return Outcome(WHAT, result, why, [_line(trial) for trial in trials], figures, PROVES)


def _try(bench: Bench, pair: EnginePair, context: Context, probabilities: np.ndarray, draft: str) -> Trial:
    token = int(probabilities.argmax() if draft == "right" else probabilities.argmin())
    index = build_index(draft_of([context.first, token], context.prompt, bench.context))
    if len(context.prompt) + TOKENS > bench.inputs.args.data.max_len:
        raise VerifyError("the prompts leave no room for three tokens in --data.max_len")
    request = Request(context.prompt, TOKENS, temperature=1.0, history=HISTORY)
    with installed(pair.speculating, {HISTORY: index}):
        before = pair.speculating.counters()
        answers = pair.speculating.answer([request] * SAMPLES)
        did = pair.speculating.counters() - before
    seconds = Counter(a.tokens[1] for a in answers if len(a.tokens) > 1 and a.tokens[0] == context.first)
    observed = [seconds[number] for number in range(len(probabilities))]
    return Trial(draft, token, did.drafted, did.accepted, seconds.total(), chi_square(observed, probabilities.tolist()))


def _line(trial: Trial) -> str:
    p_value = trial.test.p_value
    shown = "-" if p_value is None else f"{p_value:.2g}"
    return (
        f"{trial.draft} draft: p = {shown} ({trial.counted:,} tokens in {trial.test.degrees + 1} classes, "
        f"{trial.accepted:,} of {trial.drafted:,} drafts accepted)"
    )
