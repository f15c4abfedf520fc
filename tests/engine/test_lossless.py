"""Speculation changes nothing but speed: greedy equality, chi-square at temperature 1, log-probabilities.

In fp32: bf16 has near ties that batching alone can flip.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.requests import TRACE, UNCOUNTED
from rhyme_openrlhf.history.index import build_index
from rhyme_openrlhf.latency.profile import to_text
from rhyme_openrlhf.proof.chi_square import P_VALUE_FLOOR, chi_square
from rhyme_openrlhf.proof.histories import KINDS, draft_of, history
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from rhyme_openrlhf.telemetry.events import DraftBudget
from rhyme_openrlhf.telemetry.metrics import EngineCounters, acceptance_rate, tokens_per_step
from tests.latency import formula

TASKS = sorted(path.name for path in embedded.DATA.glob("*_train.jsonl"))
PROMPTS_PER_TASK = 16
# Eight numbers in brackets: a draft of other tokens than these keeps to the grammar for a few tokens at most.
NUMBERS = r"\[[0-9]{1,3}(, [0-9]{1,3}){7}\]"
# As many tokens before a piece as are looked up, so that the piece for this very place is the one that matches.
CONTEXT = HistoSpecSettings().prefix_max


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded.MODEL)


@pytest.fixture(scope="session")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded.MODEL, dtype=torch.float32)


def prompts_of(task: str, tokenizer: Any) -> list[list[int]]:
    rows = [json.loads(line) for line in (embedded.DATA / task).read_text().splitlines()]
    return [tokenizer(row["input"], add_special_tokens=False)["input_ids"] for row in rows[:PROMPTS_PER_TASK]]


def greedy(prompt: list[int], key: str | None = None) -> Any:
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    extra = {PROMPT_KEY: key} if key else None
    return SamplingParams(temperature=0, max_tokens=640 - len(prompt), logprobs=1, extra_args=extra)


@pytest.fixture(scope="session")
def plain_answers(plain_engine: Any, tokenizer: Any) -> Callable[[str], list[list[int]]]:
    """The greedy answers to a task's prompts without speculation; asked for once."""

    @functools.cache
    def answers(task: str) -> list[list[int]]:
        prompts = prompts_of(task, tokenizer)
        return [list(out.token_ids) for out in plain_engine.generate(prompts, [greedy(p) for p in prompts])]

    return answers


@pytest.mark.parametrize("kind", ["empty", *KINDS])
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("earlier", [False, True], ids=["own", "earlier runs"])
def test_greedy_output_is_the_same(
    task: str, kind: str, earlier: bool, plain_answers: Any, history_engine: Any, tokenizer: Any, tmp_path: Path
) -> None:
    prompts, expected = prompts_of(task, tokenizer), plain_answers(task)
    keys = [f"{task}-{kind}-{earlier}-{number}" for number in range(len(prompts))]
    if kind != "empty":
        for key, prompt, response in zip(keys, prompts, expected, strict=True):
            pieces = history(kind, prompt, response, CONTEXT)
            assert history_engine.install(key, build_index(pieces, len(pieces) * earlier), tmp_path) == ""
    before = EngineCounters.from_dict(history_engine.scheduler("read_counters"))
    parameters = [greedy(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
    found = [list(out.token_ids) for out in history_engine.generate(prompts, parameters)]
    did = EngineCounters.from_dict(history_engine.scheduler("read_counters")) - before
    for key in keys:
        history_engine.scheduler("forget_history", key)

    assert found == expected
    assert did.accepted_earlier == did.accepted * earlier
    # The test means something only if drafts were really accepted, or really refused.
    if kind == "empty":
        assert did.drafted == 0 and tokens_per_step(did) == 1.0
    elif kind == "right":
        assert (acceptance_rate(did) or 0) > 0.9 and (tokens_per_step(did) or 0) > 4
    elif kind in ("stale", "late"):
        assert 0.1 < (acceptance_rate(did) or 0) < 0.9
    else:
        assert did.drafted > 100 and (acceptance_rate(did) or 0) < 0.05


@pytest.mark.parametrize("task", TASKS)
def test_greedy_output_is_the_same_with_drafts_from_itself(
    task: str, plain_answers: Any, default_engine: Any, tokenizer: Any
) -> None:
    prompts, expected = prompts_of(task, tokenizer), plain_answers(task)
    before = EngineCounters.from_dict(default_engine.scheduler("read_counters"))
    parameters = [greedy(prompt, f"{task}-{number}") for number, prompt in enumerate(prompts)]
    found = [list(out.token_ids) for out in default_engine.generate(prompts, parameters)]
    did = EngineCounters.from_dict(default_engine.scheduler("read_counters")) - before
    assert found == expected
    assert did.drafted > 0 and did.accepted > 0


def test_greedy_output_is_the_same_with_drafts_from_siblings(
    plain_answers: Any, default_engine: Any, tokenizer: Any
) -> None:
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    prompts, expected = prompts_of(TASKS[0], tokenizer), plain_answers(TASKS[0])
    before = EngineCounters.from_dict(default_engine.scheduler("read_counters"))
    # Three sampled siblings beside each greedy sample: some are ahead of it, and some say something else.
    asked, parameters = [], []
    for number, prompt in enumerate(prompts):
        key = f"siblings-{number}"
        asked += [prompt] * 4
        parameters += [
            SamplingParams(temperature=1, seed=n, max_tokens=300, extra_args={PROMPT_KEY: key}) for n in range(3)
        ]
        parameters.append(greedy(prompt, key))
    found = [list(out.token_ids) for out in default_engine.generate(asked, parameters)[3::4]]
    did = EngineCounters.from_dict(default_engine.scheduler("read_counters")) - before
    assert found == expected
    assert did.accepted_siblings > 0


def test_greedy_output_is_the_same_with_drafts_from_other_prompts(
    plain_answers: Any, default_engine: Any, tokenizer: Any
) -> None:
    prompts, expected = prompts_of(TASKS[0], tokenizer), plain_answers(TASKS[0])
    # Each time the same prompts have other keys: as other prompts whose answers are the same. What earlier tests asked
    # of this engine may have put the source to rest for 960 steps; a round has some 200.
    for turn in range(8):
        before = EngineCounters.from_dict(default_engine.scheduler("read_counters"))
        parameters = [greedy(prompt, f"shared-{turn}-{number}") for number, prompt in enumerate(prompts)]
        assert [list(out.token_ids) for out in default_engine.generate(prompts, parameters)] == expected
        did = EngineCounters.from_dict(default_engine.scheduler("read_counters")) - before
        if did.accepted_shared > 0.4 * did.response_tokens:
            break
    assert did.accepted_shared > 0.4 * did.response_tokens


@pytest.mark.parametrize("kind", ["right", "adversarial"])
def test_greedy_output_is_the_same_with_history_and_a_draft_model(
    kind: str, plain_answers: Any, combined_engine: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Every second prompt has a history, so one step has drafts of both."""
    prompts, expected = prompts_of(TASKS[0], tokenizer), plain_answers(TASKS[0])
    keys = [f"both-{kind}-{number}" for number in range(len(prompts))]
    for key, prompt, response in list(zip(keys, prompts, expected, strict=True))[::2]:
        index = build_index(history(kind, prompt, response, CONTEXT))
        assert combined_engine.install(key, index, tmp_path) == ""
    before = EngineCounters.from_dict(combined_engine.scheduler("read_counters"))
    parameters = [greedy(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
    for number, one in enumerate(parameters):
        one.extra_args[TRACE] = f"both-{number}"
    found = [list(out.token_ids) for out in combined_engine.generate(prompts, parameters)]
    did = EngineCounters.from_dict(combined_engine.scheduler("read_counters")) - before
    traces = combined_engine.scheduler("take_traces", [f"both-{number}" for number in range(len(prompts))])
    sources = {source for trace in traces for _, _, source in trace["spans"]}
    assert found == expected
    # The embedded draft model is right more often than wrong history, and less often than right history.
    assert "draft_model" in sources and ("history" in sources) == (kind == "right")
    assert did.accepted > 0 and (tokens_per_step(did) or 0) > 1.3
    for key in keys:
        combined_engine.scheduler("forget_history", key)


ENDS: dict[str, dict[str, Any]] = {
    "one stop string": {"stop": [";"]},
    "several, one of several tokens": {"stop": ["1,", "2;", ";"]},
    "included in the text": {"stop": [";"], "include_stop_str_in_output": True},
    "not before a minimum": {"stop": [";"], "min_tokens": 20},
    "a limit and a stop token": {"stop": ["9"], "stop_token_ids": [7], "max_tokens": 33},
}


def test_responses_end_at_the_same_token(
    plain_engine: Any, plain_answers: Any, history_engine: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Drafts go on behind the stop string, and are accepted."""
    prompts, free = prompts_of(TASKS[0], tokenizer), plain_answers(TASKS[0])
    asked = [(place, name) for place in range(len(prompts)) for name in ENDS]

    def answers(engine: Any, keyed: bool) -> list[Any]:
        parameters = [greedy(prompts[place], f"end-{place}" if keyed else None) for place, _ in asked]
        for one, (_, name) in zip(parameters, asked, strict=True):
            for field, value in ENDS[name].items():
                setattr(one, field, value)
        return list(engine.generate([prompts[place] for place, _ in asked], parameters))

    for place, (prompt, response) in enumerate(zip(prompts, free, strict=True)):
        index = build_index(history("right", prompt, response, CONTEXT))
        assert history_engine.install(f"end-{place}", index, tmp_path) == ""
    expected = answers(plain_engine, keyed=False)
    before = EngineCounters.from_dict(history_engine.scheduler("read_counters"))
    found = answers(history_engine, keyed=True)
    did = EngineCounters.from_dict(history_engine.scheduler("read_counters")) - before
    for place in range(len(prompts)):
        history_engine.scheduler("forget_history", f"end-{place}")

    for one, other in zip(found, expected, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        assert len(one.logprobs) == len(one.token_ids)
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    ended = [name for (_, name), one in zip(asked, found, strict=True) if isinstance(one.stop_reason, str)]
    assert len(ended) > len(asked) / 3 and (tokens_per_step(did) or 0) > 3


@pytest.mark.parametrize("kind", ["right", "late"])
def test_greedy_output_is_the_same_under_a_grammar(
    kind: str, plain_engine: Any, plain_answers: Any, history_engine: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """The grammar cuts drafts, or vLLM's engine core dies; requests without a grammar run beside those with one."""
    from vllm.sampling_params import StructuredOutputsParams

    prompts, free = prompts_of(TASKS[0], tokenizer), plain_answers(TASKS[0])

    def asked(keys: list[str] | None) -> list[Any]:
        parameters = [greedy(prompt, keys[number] if keys else None) for number, prompt in enumerate(prompts)]
        for one in parameters[::2]:
            one.structured_outputs = StructuredOutputsParams(regex=NUMBERS)
        return parameters

    expected = [list(out.token_ids) for out in plain_engine.generate(prompts, asked(None))]
    assert expected[1::2] == free[1::2]
    for answer in expected[::2]:
        assert re.fullmatch(NUMBERS, tokenizer.decode(answer, skip_special_tokens=True))
    keys = [f"grammar-{kind}-{number}" for number in range(len(prompts))]
    for key, prompt, response in zip(keys, prompts, expected, strict=True):
        assert history_engine.install(key, build_index(history(kind, prompt, response, CONTEXT)), tmp_path) == ""
    # Only requests with a grammar are counted.
    parameters = asked(keys)
    for one in parameters[1::2]:
        one.extra_args[UNCOUNTED] = True
    before = EngineCounters.from_dict(history_engine.scheduler("read_counters"))
    found = [list(out.token_ids) for out in history_engine.generate(prompts, parameters)]
    did = EngineCounters.from_dict(history_engine.scheduler("read_counters")) - before
    for key in keys:
        history_engine.scheduler("forget_history", key)

    assert found == expected
    if kind == "right":
        assert (acceptance_rate(did) or 0) > 0.9 and (tokens_per_step(did) or 0) > 4
    else:
        # One token of each draft is right, and the grammar leaves little of what comes behind it.
        assert did.accepted > 50 and 0.1 < (acceptance_rate(did) or 0) < 0.9


def test_log_probabilities_equal_transformers(
    plain_answers: Any, history_engine: Any, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    import torch
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    prompts, answers = prompts_of(TASKS[0], tokenizer)[:8], plain_answers(TASKS[0])[:8]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        history_engine.install(f"lp-{number}", build_index(history("right", prompt, answer, CONTEXT)), tmp_path)
    parameters = [
        SamplingParams(temperature=1, seed=n, max_tokens=300, logprobs=1, extra_args={PROMPT_KEY: f"lp-{n}"})
        for n in range(len(prompts))
    ]
    worst = 0.0
    for prompt, output in zip(prompts, history_engine.generate(prompts, parameters), strict=True):
        tokens = list(output.token_ids)
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0], dim=-1)
        for i, (token, at) in enumerate(zip(tokens, output.logprobs, strict=True)):
            worst = max(worst, abs(at[token].logprob - expected[len(prompt) + i - 1, token].item()))
    assert worst < 1e-3


@pytest.mark.parametrize("kind", ["right", "adversarial"])
def test_sampling_follows_the_models_distribution(
    kind: str, history_engine: Any, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    """Chi-square of the token that a draft proposes, given the tokens before it, at temperature 1."""
    import torch
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    prompt, first, second_probabilities = uncertain_second_token(prompts_of(TASKS[0], tokenizer), model)
    drafted = int(torch.argmax(second_probabilities) if kind == "right" else torch.argmin(second_probabilities))
    key = f"chi-{kind}"
    # `first` is what prefill samples; the first decode step then verifies the draft.
    history_engine.install(key, build_index(draft_of([first, drafted], prompt, CONTEXT)), tmp_path)
    samples = 6000
    parameters = [SamplingParams(temperature=1, max_tokens=3, extra_args={PROMPT_KEY: key}) for _ in range(samples)]
    before = EngineCounters.from_dict(history_engine.scheduler("read_counters"))
    outputs = history_engine.generate([prompt] * samples, parameters)
    did = EngineCounters.from_dict(history_engine.scheduler("read_counters")) - before
    seconds = Counter(out.token_ids[1] for out in outputs if out.token_ids[0] == first and len(out.token_ids) > 1)
    total = sum(seconds.values())
    assert total > 2000 and did.drafted >= total * 0.99

    probabilities = second_probabilities.double().tolist()
    p_value = chi_square([seconds[token] for token in range(len(probabilities))], probabilities).p_value
    assert p_value is not None and p_value > P_VALUE_FLOOR


# A planner finds few drafts of so uncertain a token worth it.
@pytest.mark.parametrize("combined_engine", ["fixed rules"], indirect=True)
@pytest.mark.parametrize("kind", ["right", "adversarial"])
def test_sampling_with_a_draft_model_follows_the_models_distribution(
    kind: str, combined_engine: Any, tokenizer: Any, model: Any, tmp_path: Path
) -> None:
    """Chi-square of the second token where half of the samples have a history and the others only the draft model."""
    import torch
    from vllm import SamplingParams

    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    prompt, first, second_probabilities = uncertain_second_token(prompts_of(TASKS[0], tokenizer), model)
    drafted = int(torch.argmax(second_probabilities) if kind == "right" else torch.argmin(second_probabilities))
    key = f"both-chi-{kind}"
    combined_engine.install(key, build_index(draft_of([first, drafted], prompt, CONTEXT)), tmp_path)
    samples = 4000
    asked = [{PROMPT_KEY: key} if number % 2 else None for number in range(samples)]
    parameters = [SamplingParams(temperature=1, max_tokens=3, extra_args=extra) for extra in asked]
    before = EngineCounters.from_dict(combined_engine.scheduler("read_counters"))
    outputs = combined_engine.generate([prompt] * samples, parameters)
    did = EngineCounters.from_dict(combined_engine.scheduler("read_counters")) - before
    seconds = Counter(out.token_ids[1] for out in outputs if out.token_ids[0] == first and len(out.token_ids) > 1)
    total = sum(seconds.values())
    assert total > 1300 and did.drafted > total / 2
    probabilities = second_probabilities.double().tolist()
    p_value = chi_square([seconds[token] for token in range(len(probabilities))], probabilities).p_value
    assert p_value is not None and p_value > P_VALUE_FLOOR


def uncertain_second_token(prompts: list[list[int]], model: Any) -> tuple[list[int], int, Any]:
    """A context, its likeliest next token, and the distribution after that one, which is spread widely."""
    import torch

    best: tuple[float, list[int], int, Any] | None = None
    for prompt in prompts:
        with torch.no_grad():
            text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)[0].tolist()
            probabilities = torch.softmax(model(torch.tensor([text])).logits[0], dim=-1)
        for at in range(len(prompt), len(text) - 2):
            first = probabilities[at - 1, text[at]].item()
            spread = -(probabilities[at] * probabilities[at].clamp_min(1e-9).log()).sum().item()
            if first > 0.6 and (best is None or spread > best[0]):
                best = (spread, text[:at], text[at], probabilities[at])
    assert best is not None
    return best[1], best[2], best[3]


def test_what_is_traced_of_drafts_is_what_was_accepted(default_engine: Any, tokenizer: Any) -> None:
    prompts = prompts_of(TASKS[0], tokenizer)
    parameters = [greedy(prompt, f"traced-{number}") for number, prompt in enumerate(prompts)]
    for number, one in enumerate(parameters):
        one.extra_args[TRACE] = f"trace-{number}"
    before = EngineCounters.from_dict(default_engine.scheduler("read_counters"))
    found = default_engine.generate(prompts, parameters)
    did = EngineCounters.from_dict(default_engine.scheduler("read_counters")) - before
    traces = default_engine.scheduler("take_traces", [f"trace-{number}" for number in range(len(prompts))])
    accepted = 0
    for out, trace in zip(found, traces, strict=True):
        at = 1  # a sample's first token comes from its prefill
        for first, end, source in trace["spans"]:
            assert at <= first < end and source in ("history", "siblings", "own", "shared")
            at = end + 1  # behind an accepted draft there is a token of the model's own
            accepted += max(0, min(end, len(out.token_ids)) - first)
    assert (sum(trace["drafted"] for trace in traces), accepted) == (did.drafted, did.accepted)
    assert accepted > 0
    again = default_engine.scheduler("take_traces", ["trace-0"])
    assert again[0]["drafted"] == 0


def test_greedy_output_is_the_same_when_a_planner_cuts_the_drafts(
    plain_answers: Any, default_engine: Any, tokenizer: Any
) -> None:
    """By a profile of another machine, so that what is cut changes while step times are learnt."""
    from vllm import SamplingParams

    prompts, expected = prompts_of(TASKS[0], tokenizer), plain_answers(TASKS[0])
    assert (
        default_engine.scheduler("install_profile", "{}") == "the profile has format None; this version reads format 1"
    )
    assert default_engine.scheduler("install_profile", to_text(formula.profile())) == ""
    # Sampled ones beside the greedy ones, so that there are siblings to draft from.
    asked, parameters = [], []
    for number, prompt in enumerate(prompts):
        key = f"planned-{number}"
        asked += [prompt] * 3
        parameters += [SamplingParams(temperature=1, seed=n, max_tokens=200, extra_args=of(key)) for n in range(2)]
        parameters.append(greedy(prompt, key))
    for time in range(4):
        if time < 2:
            default_engine.scheduler("take_decisions")
        assert [list(out.token_ids) for out in default_engine.generate(asked, parameters)[2::3]] == expected
    # What the second time and those after it expect, it has learnt.
    budget = DraftBudget(1, 0, **default_engine.scheduler("take_decisions"))
    assert sum(budget.decode_steps) > 100 and max(budget.running) > 32
    drafted = sum(n * b * d for n, b, d in zip(budget.decode_steps, budget.running, budget.draft_length, strict=True))
    accepted = sum(n * a for n, a in zip(budget.decode_steps, budget.accepted, strict=True))
    foreseen = sum(n * a for n, a in zip(budget.decode_steps, budget.expected_accepted, strict=True))
    assert 0 < accepted <= drafted
    assert 1 / 2 < foreseen / accepted < 2
    assert default_engine.scheduler("take_decisions")["running"] == []


def of(key: str) -> dict[str, str]:
    from rhyme_openrlhf.engine.requests import PROMPT_KEY

    return {PROMPT_KEY: key}
