"""A front of the samples' home: the actor in which prompts are tokenized, and agents and rewards run.

The home sends it whole prompts, and gets whole responses. For each response that an engine is to generate, the front
asks the home in token ids. So no user's code and no tokenizer runs in the interpreter of the home, which hears from all
engines. There is one front on each node that has engines (`fronts.py`).

Invariants:
- A prompt's responses are those of an engine's own `generate_responses`, with the same seeds. The one exception is
  notes on drafts of kept samples, which are not made because they would be on several engines.
- A front has one tokenizer, which it gets when it is made.
- When one sample of a prompt fails, its siblings are given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from rhyme_openrlhf.engine.checked_agent import executor_of
from rhyme_openrlhf.engine.checked_reward import CheckedExecutor, check_response
from rhyme_openrlhf.engine.messages import LOADS, Packed, unpacked
from rhyme_openrlhf.engine.requests import SampleIdentity, leave_out_unread, request_seed, visit_of
from rhyme_openrlhf.engine_errors import EngineLost, last_line
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round


@dataclass(frozen=True)
class RoundRequest:
    """A request for one response of a sample; `sample`: its number in its prompt group, `round`: of its conversation.

    `engine`: where it begins; `multi_modal`: as OpenRLHF passes it.
    """

    sample: int
    round: int
    engine: int
    tokens: tuple[int, ...]
    parameters: Any
    multi_modal: Any = None


@dataclass(frozen=True)
class RoundResponse:
    """vLLM's output for a round, what is noted of the round so far, and the engine where it ended.

    `weight_version`: that engine's when it ended; None where the output says what was loaded meanwhile.
    """

    output: Any
    noted: Round
    engine: int
    weight_version: int | None


class HomeCalls(Protocol):
    """The calls of a front to the home."""

    async def respond(self, call: int, asked: RoundRequest) -> RoundResponse:
        """Return the response to a round of the prompt group that the home sent as `call`. Raises EngineLost."""


class Front:
    """A run's executor; `agent`, `reward`: OpenRLHF's --train.agent_func_path and --reward.remote_url."""

    def __init__(
        self, home: HomeCalls, rhyme: RhymeSettings, run_seed: int, agent: str | None, reward: Any, tokenizer: Any
    ) -> None:
        self._home = home
        self._rhyme = rhyme
        self._run_seed = run_seed
        self._tokenizer = tokenizer
        self.executor: Any = executor_of(agent, reward, rhyme.limits.reward_s)

    async def ready(self) -> None:
        """Answer once it has started."""

    async def generate_responses(
        self,
        call: int,
        engine: int,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: None = None,
        num_samples: int = 1,
        images: Any = None,
    ) -> list[dict[str, Any]]:
        """Return the responses to one prompt, as an engine's method of this name; they begin at `engine`.

        `call`: the home's number of this prompt group; `hf_tokenizer`: a parameter of upstream's, never given.
        """
        visit, text = visit_of(prompt), str(prompt)

        async def one(sample: int) -> dict[str, Any]:
            conversation = _Conversation(self, call, engine, SampleIdentity(text, visit, sample))
            response: dict[str, Any] = await self.executor.execute(
                prompt=text,
                label=label,
                sampling_params=sampling_params,
                max_length=max_length,
                hf_tokenizer=self._tokenizer,
                llm_engine=conversation,
                images=images,
            )
            check_response(response)
            response[ROUNDS] = conversation.identity.rounds
            return response

        return await all_or_none(one(sample) for sample in range(num_samples))

    async def respond(
        self, call: int, identity: SampleIdentity, engine: int, tokens: list[int], parameters: Any, multi_modal: Any
    ) -> tuple[Any, int]:
        """Have the home answer one round that begins at `engine`; return vLLM's output, and where the round ended."""
        parameters = parameters.clone()
        if type(self.executor) is CheckedExecutor:
            leave_out_unread(parameters)
        if self._rhyme.run.reproducible:
            parameters.seed = request_seed(self._run_seed, identity, len(tokens))
        number = len(identity.rounds)
        # Rounds stand in the order in which they began.
        identity.rounds.append(Round(engine, 0, len(tokens)))
        asked = RoundRequest(identity.sample, number, engine, tuple(tokens), parameters, multi_modal)
        response = await self._home.respond(call, asked)
        output = unpacked(response.output)
        noted = identity.rounds[number] = response.noted
        noted.loads = getattr(output, LOADS, [])
        version = response.weight_version
        if version is None:
            # Its engine may have gone on to its next turn by now.
            version = noted.loads[-1][0] if noted.loads else noted.weight_version
        noted.end(version, output.outputs[0])
        return output, response.engine


class _Conversation:
    """A stand-in for an executor's engine: each round begins where the one before ended."""

    def __init__(self, front: Front, call: int, engine: int, identity: SampleIdentity) -> None:
        self._front = front
        self._call = call
        self._engine = engine
        self.identity = identity

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Return one response, as OpenRLHF's engine actor gives it."""
        output, self._engine = await self._front.respond(
            self._call, self.identity, self._engine, prompt_token_ids, sampling_params, multi_modal_data
        )
        return output


async def all_or_none(coroutines: Iterable[Coroutine[Any, Any, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what each returns; when one raises, cancel the others and raise its error."""
    # Each in a task, so with its own copy of the context.
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        # Not awaited: a user's agent may take its time, or never end.
        for task in tasks:
            task.cancel()


class HomeUnreached(EngineLost):
    """A front did not reach the home, or lost its answer."""


class RayHome:
    """The home's actor, as a front calls it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def respond(self, call: int, asked: RoundRequest) -> RoundResponse:
        """Return the home's response. Raises HomeUnreached, and what the home raises."""
        try:
            response: RoundResponse = await self._handle.respond.remote(call, asked)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise HomeUnreached(f"the home of samples was not reached: {last_line(error)}") from error
        return response


class PlainFrontActor(Front):
    """`home`: the handle of the home's actor; the rest as of `Front`."""

    def __init__(self, home: Any, *more: Any) -> None:
        super().__init__(RayHome(home), *more)

    async def packed_responses(self, call: int, engine: int, **arguments: Any) -> list[Packed]:
        """Return `generate_responses`, each packed: the home passes them on."""
        responses = await self.generate_responses(call, engine, **arguments)
        # An agent's own classes are in no module that others could import.
        return [Packed(ray.cloudpickle.dumps(response)) for response in responses]
