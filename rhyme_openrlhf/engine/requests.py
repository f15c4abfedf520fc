"""The one place that makes requests for vLLM: prompt, sampling parameters, seed, and data for our scheduler.

The data for our scheduler stands in vLLM's `SamplingParams.extra_args`, under the keys below (`ARRIVED` is in
messages.py, beside what it holds).

Seeds make two runs with the same seed sample the same tokens: OpenRLHF 0.11.2 seeds neither its prompts' order nor its
requests, and trains samples in the order in which they finish. With `--run.reproducible` the same is seeded for
OpenRLHF's own classes and ours. Without it nothing of that runs, and behaviour is upstream's.

Invariants:
- A request's `cache_salt` is the weight version that it starts with, so a request never finds a KV block of another
  version.
- The parameters that a caller hands in are never changed.
"""

from __future__ import annotations

import asyncio
import random
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from rhyme_openrlhf.engine_errors import RefusedParameterError
from rhyme_openrlhf.prompt_keys import evaluation_key, prompt_key
from rhyme_openrlhf.telemetry.samples import ROUNDS

# The prompt whose history the request may draft from (prompt_keys.py::prompt_key).
PROMPT_KEY = "rhyme_prompt_key"
# The request is a check of ours, not a sample: it does not appear in the engine's counters.
UNCOUNTED = "rhyme_uncounted"
# True: the request goes before all that wait; it is over after one step.
FIRST = "rhyme_first"
# The name under which the scheduler keeps which of the request's tokens came from drafts, until they are asked for.
TRACE = "rhyme_trace"
# The size of the speculation window that the request's sample had at another engine.
WINDOW = "rhyme_window"
# The request's context is there without being computed (profiling_connector.py).
FILLED = "rhyme_filled_context"

# Log-probabilities that OpenRLHF's executor asks for; `rhyme verify` asks for more and reads more.
UPSTREAM_LOGPROBS = 1
# vLLM's word for "the log-probability of every token of the vocabulary".
ALL_TOKENS = -1


# --- prompts and parameters


def prompt_of(tokens: Sequence[int], weight_version: int, multi_modal: Any = None, padding: Any = None) -> Any:
    """Return vLLM's prompt of a request that starts with this weight version.

    `multi_modal`: as OpenRLHF passes it; `padding`: the tokens that stand for it in `tokens`.
    """
    from openrlhf.utils.vlm_utils import dedup_media_tokens
    from vllm.inputs import TokensPrompt

    tokens = list(tokens)
    if multi_modal and padding:
        tokens = dedup_media_tokens(tokens, padding)
    prompt = TokensPrompt(prompt_token_ids=tokens, cache_salt=f"weights-{weight_version}")
    if multi_modal:
        prompt["multi_modal_data"] = multi_modal
    return prompt


def final_only(parameters: Any) -> Any:
    """Return a copy of sampling parameters of which vLLM builds the final output alone.

    Upstream has vLLM build an output after every step and drops all but the last.
    """
    from vllm.sampling_params import RequestOutputKind

    copy = parameters.clone()
    copy.output_kind = RequestOutputKind.FINAL_ONLY
    return copy


def leave_out_unread(parameters: Any) -> None:
    """Do not ask vLLM for what OpenRLHF's single-turn executor never reads (openrlhf/utils/agent.py).

    It takes token ids and the sampled token's log-probability. Text costs as much CPU time a token as a small model's
    forward pass, and is needed only to find stop strings; `logprobs=1` adds the likeliest token to the sampled one,
    for a top-k over the vocabulary. What is sampled stays the same.
    """
    parameters.detokenize = bool(parameters.stop)
    if parameters.logprobs == UPSTREAM_LOGPROBS:
        parameters.logprobs = 0


def scored() -> Any:
    """Return the parameters of a request whose prompt's log-probabilities are read, before samples that wait.

    vLLM draws no random number for it (see `generate_alike`), so samples are those of a run without it.
    """
    from vllm import SamplingParams

    told = {UNCOUNTED: True, FIRST: True}
    return SamplingParams(temperature=0, seed=0, max_tokens=1, prompt_logprobs=1, extra_args=told)


def checked(max_tokens: int, temperature: float = 0.0, top_p: float = 1.0, logprobs: int = 0) -> Any:
    """Return the parameters of a request of a check."""
    from vllm import SamplingParams

    return SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, logprobs=logprobs)


def refused(parameters: Any) -> list[str]:
    """Return the names of the given parameters that vLLM refuses wherever it speculates.

    Sending such a request without drafts is no way out: a speculating vLLM does not even load what applies them
    (`v1/sample/logits_processor/__init__.py::build_logitsprocs`), so they would be ignored. Checked against vLLM 0.29.0
    `sampling_params.py`; test: `tests/engine/test_requests.py`.
    """
    given = {name: getattr(parameters, name, None) for name in ("min_p", "logit_bias", "trace_decode_token_ids")}
    return [name for name, value in given.items() if value]


async def generate(llm: Any, prompt: Any, parameters: Any, request_id: str) -> Any:
    """Return vLLM's output of one request, whose parameters are FINAL_ONLY.

    Raises RefusedParameterError where the engine speculates and vLLM refuses a parameter for that.
    """
    if llm.vllm_config.speculative_config is not None and (names := refused(parameters)):
        raise RefusedParameterError(
            f"the agent (--train.agent_func_path) asks for {' and '.join(names)} in its sampling parameters, which "
            "vLLM cannot apply in an engine with drafts: add --no-histospec.enable, or leave the parameter out"
        )
    outputs = [output async for output in llm.generate(prompt, parameters, request_id=request_id)]
    return outputs[-1]


async def generate_alike(
    llm: Any, sequences: int, length: int, tokens: int, arguments: dict[str, Any], draws: bool = True
) -> None:
    """Generate `tokens` tokens each for `sequences` prompts of `length` tokens, at once; they count nowhere.

    They sample at temperature 1, as runs do. Without `draws` they take no random number from the engine, whose later
    samples are then those of an engine without these requests. `arguments`: more of their `extra_args`.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils import random_uuid

    parameters = SamplingParams(
        # vLLM's first model runner draws for every request above temperature 0, its second for every one without a
        # seed.
        temperature=1.0 if draws else 0.0,
        seed=None if draws else 0,
        max_tokens=tokens,
        min_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={UNCOUNTED: True} | arguments,
    )
    most = llm.vllm_config.model_config.get_vocab_size()
    # Different tokens, so that no prefix is found in a cache.
    chance = random.Random(time.perf_counter_ns())

    async def one() -> None:
        prompt = TokensPrompt(prompt_token_ids=[chance.randrange(most) for _ in range(length)])
        await generate(llm, prompt, parameters.clone(), random_uuid())

    await asyncio.gather(*(one() for _ in range(sequences)))


# --- who a sample is, and its seeds


@dataclass(frozen=True)
class SampleIdentity:
    """The identity of a response: the `sample`-th of the `visit`-th time that `prompt` is answered.

    Visits of evaluations are negative. `rounds`: notes on its requests, one entry each (telemetry/samples.py); no part
    of the identity.
    """

    prompt: str
    visit: int
    sample: int
    rounds: list[Any] = field(default_factory=list, compare=False)


class VisitedPrompt(str):
    """A prompt that knows which visit it is (SampleIdentity.visit), counted where all prompts are sent from.

    An engine that counts by itself, as OpenRLHF's own classes must, knows only its own visits. With more than one
    engine, or after a resume, two visits would then get the same seeds.
    """

    visit: int

    def __new__(cls, text: str, visit: int) -> VisitedPrompt:
        prompt = super().__new__(cls, text)
        prompt.visit = visit
        return prompt

    def __reduce__(self) -> tuple[Any, ...]:
        return VisitedPrompt, (str(self), self.visit)


def history_key(prompt: str, visit: int) -> str:
    """Return the key of the history that a visit of a prompt drafts from: evaluations have one of their own."""
    key = prompt_key(prompt)
    return evaluation_key(key) if visit < 0 else key


def visit_of(prompt: str) -> int:
    """Return the visit that a prompt's sender says it is; 0 where it says none."""
    return prompt.visit if isinstance(prompt, VisitedPrompt) else 0


# Set around each sample's generation; a sample's own requests run in the same asyncio context.
current_sample: ContextVar[SampleIdentity | None] = ContextVar("current_sample", default=None)


class Seeds:
    """Identities of one engine's samples, and the seeds of their requests."""

    def __init__(self, run_seed: int, reproducible: bool) -> None:
        self._run_seed = run_seed
        self._reproducible = reproducible
        self._visits: Counter[str] = Counter()

    async def answers(
        self, prompt: str, samples: int, answer: Callable[[str], Awaitable[list[dict[str, Any]]]]
    ) -> list[dict[str, Any]]:
        """Return `samples` answers to a prompt; each knows which sample it is, and notes its requests."""
        visit = self._visit(prompt)
        # A plain string from here on, because receivers may keep or send it.
        prompt = str(prompt)

        async def one(sample: int) -> dict[str, Any]:
            identity = SampleIdentity(prompt, visit, sample)
            current_sample.set(identity)
            (response,) = await answer(prompt)
            response[ROUNDS] = identity.rounds
            return response

        # gather() runs each coroutine in a task with its own copy of the context.
        return list(await asyncio.gather(*(one(sample) for sample in range(samples))))

    def _visit(self, prompt: str) -> int:
        """Return which visit of the prompt this is: as its sender says, or else as counted here."""
        if isinstance(prompt, VisitedPrompt):
            return prompt.visit
        self._visits[prompt] += 1
        return self._visits[prompt] - 1

    def seed(self, parameters: Any, prompt_tokens: int) -> None:
        """Give a request of the current sample its own seed, if the run is reproducible."""
        identity = current_sample.get()
        if self._reproducible and identity is not None:
            parameters.seed = request_seed(self._run_seed, identity, prompt_tokens)


def request_seed(run_seed: int, identity: SampleIdentity, prompt_tokens: int) -> int:
    """Return the seed of one request; `prompt_tokens` (its length) tells the rounds of a conversation apart."""
    text = f"{run_seed}|{identity.prompt}|{identity.visit}|{identity.sample}|{prompt_tokens}"
    return zlib.crc32(text.encode())
