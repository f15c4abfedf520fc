"""Drafts change nothing of what is trained: token ids, masks and log-probabilities of whole responses.

Random cases, each from a seed: temperatures, top-p, top-k, penalties, limits, stop strings and tokens, bad words,
agents of several rounds. They go the way of a run: through the engine actor, its executor, and OpenRLHF's experience of
the response. Drafts are right, wrong, or right in part. Without them the same engine answers. The model itself says how
likely each token was, in float64 and by the parameters' definitions (sampling_distribution.py).

At temperature 0 responses are equal. Above it their distributions are. Each token has a place between 0 and 1 in the
distribution given all tokens before it, with a random number for its own share. Places of a right sampler are uniform
and independent in every context, so all places of all contexts make one test. Samples have seeds of their own, so
a result repeats.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rhyme_openrlhf import embedded
from rhyme_openrlhf.engine.requests import VisitedPrompt
from rhyme_openrlhf.history.index import build_index
from rhyme_openrlhf.prompt_keys import prompt_key, round_key
from rhyme_openrlhf.proof.chi_square import chi_square
from rhyme_openrlhf.proof.histories import KINDS, history
from rhyme_openrlhf.settings.drafting import V1, DraftingSettings, HistoSpecSettings
from rhyme_openrlhf.settings.run import RunSettings
from rhyme_openrlhf.telemetry.metrics import EngineCounters, tokens_per_step
from tests.engine.actors import Actor, MadeUpWorker, an_actor
from tests.engine.sampling_distribution import log_probabilities
from tests.moves.engines import RUNNER

pytestmark = pytest.mark.slow

SEED = 51
MAX_LENGTH = 320
FREE_TOKENS = 70
CONTEXT = HistoSpecSettings().prefix_max
# fp32: the same sums in another order.
TOLERANCE = 1e-3
SAMPLED_CASES, SAMPLES = 16, 24
# Fewer where kernels are interpreted (tests/moves/test_second_runner.py).
GREEDY_CASES = 96 if RUNNER == V1 else 24
# Draft tokens that are refused / those accepted, at least. With steps scheduled ahead all samples share a step's room,
# so wrong drafts are shorter.
REFUSED = 1.0 if RUNNER == V1 else 0.2
# Chance that a right sampler fails any of the tests of a run: each of n tests has a chance of ALARM / n.
ALARM = 1e-6
BINS = 20


@dataclass(frozen=True)
class Case:
    """A prompt with its sampling parameters, the rounds of its conversation, and the kind of its drafts."""

    number: int
    prompt: str
    kind: str
    rounds: int
    values: Mapping[str, Any]

    def parameters(self, **others: Any) -> Any:
        from vllm import SamplingParams

        return SamplingParams(**{"logprobs": 1, "max_tokens": FREE_TOKENS, **self.values, **others})

    def __str__(self) -> str:
        return f"case {self.number} of seed {SEED}: {self.values}, {self.rounds} rounds, {self.kind} drafts"


def case_of(number: int, prompt: str, said: Sequence[int], text: str, greedy: bool) -> Case:
    """Draw the case `number`; `said`: what the model says to the prompt, where what stops a response is from."""
    chance = random.Random(f"{SEED}-{number}-{greedy}")
    texts = [text[at : at + chance.randint(1, 3)] for at in chance.sample(range(len(text)), min(len(text), 6))]
    rounds = chance.choice([1, 1, 3])
    values = {
        "temperature": 0.0 if greedy else chance.choice([0.5, 0.8, 1.0, 1.3, 2.0]),
        "top_p": chance.choice([1.0, 0.95, 0.7]),
        "top_k": chance.choice([0, 0, 40, 5]),
        "repetition_penalty": chance.choice([1.0, 1.0, 1.1]),
        "presence_penalty": chance.choice([0.0, 0.0, 0.6]),
        "frequency_penalty": chance.choice([0.0, 0.0, 0.2]),
        "min_tokens": chance.choice([0, 1, 7, 20]),
        "max_tokens": chance.choice([20, 33, FREE_TOKENS]),
        "stop": texts[: chance.choice([1, 2, 3] if rounds > 1 else [0, 1, 3])],
        "include_stop_str_in_output": chance.random() < 0.5,
        "stop_token_ids": chance.choice([[], [], chance.sample(sorted(set(said)), min(3, len(set(said))))]),
        "bad_words": [word for word in texts[3 : chance.choice([3, 3, 5])] if word.strip()],
        "ignore_eos": chance.random() < 0.2,
    }
    return Case(number, prompt, chance.choice(KINDS), rounds, values)


@pytest.fixture(scope="session")
def drafting_actor(starts_engine: None) -> Iterator[Actor]:
    """Drafts from history alone, in every decode step, and a seed for each sample."""
    settings = HistoSpecSettings(
        own_output=False, siblings=False, shared_tokens=0, extend_confidence=1.0, stop_confidence=0.0
    )
    every, run = DraftingSettings(probe_share=0, runner=RUNNER), RunSettings(reproducible=True)
    with an_actor(histospec=settings, drafting=every, run=run) as found:
        yield found


class Bench:
    """The actor, the model behind it, and prompts that no two cases share."""

    def __init__(self, actor: Actor) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.actor = actor
        self.model = AutoModelForCausalLM.from_pretrained(embedded.MODEL, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(embedded.MODEL)
        rows = [row for path in embedded.DATA.glob("*_train.jsonl") for row in path.read_text().splitlines()]
        self.prompts = sorted({prompt for row in rows if len(prompt := json.loads(row)["input"]) < 120})

    def tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def generate(self, asked: Sequence[tuple[list[int], Any]]) -> list[list[int]]:
        """Return a response to each prompt, of no sample of a run."""

        async def every() -> list[Any]:
            return await asyncio.gather(*(self.actor.raw.generate(*one) for one in asked))

        return [list(output.outputs[0].token_ids) for output in self.actor.call(every())]

    def cases(self, count: int, greedy: bool) -> list[Case]:
        from vllm import SamplingParams

        prompts = random.Random(SEED).sample(self.prompts, count)
        free = SamplingParams(temperature=0, max_tokens=FREE_TOKENS, logprobs=1)
        said = self.generate([(self.tokens(prompt), free) for prompt in prompts])
        texts = [self.tokenizer.decode(response, skip_special_tokens=True) for response in said]
        return [case_of(n, *drawn, greedy) for n, drawn in enumerate(zip(prompts, said, texts, strict=True))]

    def responses(
        self, cases: Sequence[Case], samples: int, indexes: Mapping[str, Any], visit: int
    ) -> tuple[list[list[Any]], EngineCounters]:
        """Return OpenRLHF's responses to each case, as a run gets them, and what the engine did for them."""
        from openrlhf.utils.agent import MultiTurnAgentExecutor

        from rhyme_openrlhf.engine.checked_agent import CheckedAgent

        raw = self.actor.raw
        before = self.actor.call(raw.totals())
        found: dict[int, list[Any]] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(raw.histories.feed, "_workers", [MadeUpWorker(dict(indexes))])
            for several in (False, True):
                if several:
                    patch.setattr(raw, "executor", CheckedAgent(MultiTurnAgentExecutor(agent()), "agent.py"))

                async def every(several: bool = several) -> list[Any]:
                    return await asyncio.gather(*(one(case) for case in cases if (case.rounds > 1) == several))

                async def one(case: Case) -> None:
                    prompt = VisitedPrompt(case.prompt, visit)
                    length = len(self.tokens(case.prompt)) + 100 if case.rounds > 1 else MAX_LENGTH
                    found[case.number] = await raw.generate_responses(
                        prompt, "", case.parameters(), length, self.tokenizer, samples
                    )

                self.actor.call(every())
        assert raw.histories.feed.take_problems() == []
        return [found[case.number] for case in cases], self.actor.call(raw.totals()) - before

    def indexes(self, cases: Sequence[Case], responses: Sequence[Any]) -> dict[str, Any]:
        """Return a draft index for each round of each case: of what would be said there without an end."""
        places, asked = [], []
        for case, response in zip(cases, responses, strict=True):
            for number, (start, _) in enumerate(response["action_ranges"]):
                before = list(response["observation_tokens"][:start])
                places.append((case, number, before))
                free = case.parameters(temperature=0, stop=[], min_tokens=FREE_TOKENS, max_tokens=FREE_TOKENS)
                asked.append((before, free))
        found = {}
        for (case, number, before), said in zip(places, self.generate(asked), strict=True):
            pieces = history(case.kind, before, said, CONTEXT)
            found[round_key(prompt_key(case.prompt), number)] = build_index(pieces)
        return found

    def expected(self, case: Case, response: Any) -> Iterator[tuple[list[int], list[float], np.ndarray]]:
        """Yield each round's tokens, their log-probabilities by the engine, and all of them by the model."""
        tokens = list(response["observation_tokens"])
        bad_words = [self.tokens(word) for word in case.values["bad_words"]]
        for number, (start, end) in enumerate(response["action_ranges"]):
            said, parameters = tokens[start:end], case.parameters(**{"min_tokens": 0} if number else {})
            by_model = log_probabilities(self.model, tokens[:start], said, parameters, bad_words)
            yield said, response["rollout_log_probs"][start:end], by_model


def agent() -> Any:
    """Return an agent of three rounds."""
    import torch
    from openrlhf.utils.agent import AgentInstanceBase

    class Rounds(AgentInstanceBase):
        def __init__(self) -> None:
            self.number = 0

        async def step(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
            self.number += 1
            # OpenRLHF gives each round the tokens that are left, and vLLM refuses a minimum above them.
            parameters = states["sampling_params"].clone()
            parameters.min_tokens = 0
            return {
                "rewards": torch.tensor(float(len(states["action_text"]))), "done": self.number == 3,
                "environment_feedback": "" if self.number == 3 else ",", "sampling_params": parameters,
            }  # fmt: skip

    return Rounds


@pytest.fixture(scope="session")
def bench(drafting_actor: Actor) -> Bench:
    return Bench(drafting_actor)


def trained(response: Any) -> tuple[list[int], list[int], list[float], Any]:
    """Return ids, mask and log-probabilities of the experience that OpenRLHF makes of a response, and its notes."""
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    one = SamplesGenerator._process_response_into_experience(None, response, max_len=MAX_LENGTH)
    notes = {name: value.tolist() for name, value in one.info.items()} | {"truncated": response["truncated"]}
    return *(field[0].tolist() for field in (one.sequences, one.action_mask, one.rollout_log_probs)), notes


def test_greedy_responses_are_trained_alike_with_drafts_and_without(bench: Bench) -> None:
    cases = bench.cases(GREEDY_CASES, greedy=True)
    without, idle = bench.responses(cases, 1, {}, 0)
    assert idle.drafted == 0
    found, did = bench.responses(cases, 1, bench.indexes(cases, [one for (one,) in without]), 1)
    assert (tokens_per_step(did) or 0) > 1.5 and did.drafted > (1 + REFUSED) * did.accepted

    several = 0
    for case, (plain,), (drafted,) in zip(cases, without, found, strict=True):
        ids, mask, log_probs, notes = trained(plain)
        other_ids, other_mask, other_log_probs, other_notes = trained(drafted)
        assert (other_ids, other_mask, other_notes) == (ids, mask, notes), case
        assert other_log_probs == pytest.approx(log_probs, abs=TOLERANCE), case
        for said, by_engine, by_model in bench.expected(case, drafted):
            at = np.arange(len(said))
            assert by_model[at, said] == pytest.approx(by_model.max(axis=1), abs=TOLERANCE), case
            assert by_engine == pytest.approx(by_model[at, said], abs=TOLERANCE), case
        several += len(drafted["action_ranges"]) > 1
    assert several > GREEDY_CASES / 5


def test_sampled_responses_follow_the_models_distribution_with_drafts_and_without(bench: Bench) -> None:
    drawn = bench.cases(SAMPLED_CASES, greedy=False)
    groups: dict[str, list[float]] = defaultdict(list)
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    # The first round of a conversation goes on differently in each sample: its later rounds draft from the first one's.
    seeds, _ = bench.responses(drawn, 1, {}, 0)
    for visit, kind in enumerate(("none", *KINDS), start=1):
        cases = [replace(case, kind=kind) for case in drawn]
        indexes = {} if kind == "none" else bench.indexes(cases, [one for (one,) in seeds])
        answers, did = bench.responses(cases, SAMPLES, indexes, visit)
        assert did.drafted > did.response_tokens / 4 if indexes else did.drafted == 0, kind
        chance = np.random.default_rng(SEED + visit)
        for case, responses in zip(cases, answers, strict=True):
            for response in responses:
                for number, (said, by_engine, by_model) in enumerate(bench.expected(case, response)):
                    at = np.arange(len(said))
                    assert by_engine == pytest.approx(by_model[at, said], abs=TOLERANCE), case
                    uniform = positions(by_model, said, chance)
                    groups[f"{kind} drafts, case {case.number}"] += uniform
                    for place, value in enumerate(uniform):
                        groups[f"{kind} drafts, place {min(place, 12)}, round {number}"].append(value)
                    pairs[kind] += zip(uniform[::2], uniform[1::2], strict=False)

    p_values = {name: uniformity([values]) for name, values in groups.items() if len(values) > 5 * BINS}
    for kind, found in pairs.items():
        p_values[f"{kind} drafts, one token and the next"] = uniformity(list(zip(*found, strict=True)))
    floor = ALARM / len(p_values)
    assert {name: p_value for name, p_value in p_values.items() if not p_value > floor} == {}, f"seed {SEED}"


def positions(log_probs: np.ndarray, tokens: Sequence[int], chance: np.random.Generator) -> list[float]:
    """Return where each token stands in its distribution, likeliest tokens first: uniform if it was drawn from it."""
    chances = np.exp(log_probs)
    own = chances[np.arange(len(tokens)), tokens][:, None]
    # Of equally likely tokens, those with a smaller id come first.
    first = (chances > own) | ((chances == own) & (np.arange(chances.shape[1]) < np.array(tokens)[:, None]))
    return ((chances * first).sum(axis=1) + chance.random(len(tokens)) * own[:, 0]).tolist()


def uniformity(columns: Sequence[Sequence[float]]) -> float:
    """Return the p-value of rows of numbers being independent and uniform between 0 and 1."""
    bins = BINS if len(columns) == 1 else 5
    counts, _ = np.histogramdd(np.array(columns).T, bins=bins, range=[(0, 1 + 1e-9)] * len(columns))
    p_value = chi_square(counts.astype(int).ravel().tolist(), [1.0] * counts.size).p_value
    assert p_value is not None
    return p_value
