"""OpenRLHF's single-turn executor, whose reward must come, in time, and be a number.

Upstream logs an error of the reward function and goes on without a reward, waits for ever for a function that hangs,
and trains on NaN. A server has upstream's own limit: five attempts of 180 s each. Checked against OpenRLHF 0.11.2
`utils/agent.py`.

Invariant: a sample leaves with a finite reward, or generating it fails with a RewardError that names the reward
function and the prompt, also where the function raises SystemExit. What a right reward function returns is not changed.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import ContextVar
from typing import Any

from openrlhf.utils.agent import SingleTurnAgentExecutor

# As much of a prompt as tells it from others, on one line.
SHOWN_PROMPT = 60
# How often a reward function is asked for the reward of a response. OpenRLHF asks a server five times by itself.
ATTEMPTS = 2


class RewardError(RuntimeError):
    """A sample has no usable reward; the message names the reward function, the prompt, and what to do."""


class RewardLateError(RewardError):
    """A reward that did not come in time, also when it was asked for again; the streaming pipeline does without it."""


class _ExitError(RuntimeError):
    """A reward function wanted to end its process; the cause is what it raised, at which asyncio ends its loop."""


class _LateError(TimeoutError):
    """A reward function was given up. (Its own code may raise TimeoutError.)"""


_failure: ContextVar[list[RewardError]] = ContextVar("reward_failure")


class CheckedExecutor(SingleTurnAgentExecutor):
    """Generates one response and has it rewarded, by a function within `limit_s` seconds.

    A reward function's clock starts when the function does: upstream runs it in one of asyncio's few threads, and
    waiting for a thread while others use them is no fault. One that hangs keeps a thread of its own, none of those.
    """

    def __init__(self, remote_rm_url: Any, limit_s: float) -> None:
        super().__init__(remote_rm_url)
        self._limit_s = limit_s
        # Upstream leaves it None where the reward comes from elsewhere than a Python function.
        self.reward_func: Any = self.reward_func and given_up_after(limit_s, self.reward_func)

    async def execute(self, prompt: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the response, as upstream. Raises RewardError."""
        failures: list[RewardError] = []
        # Each sample runs in an asyncio task, so in a context of its own.
        _failure.set(failures)
        output: dict[str, Any] = await super().execute(prompt, *args, **kwargs)
        if not failures and self.reward_endpoints and output["reward"] is None:
            failures.append(RewardError("returned no 'rewards'"))
        if failures:
            raise type(failures[0])(f"the reward function {self.reward_endpoints[0]} {failures[0]} for {shown(prompt)}")
        return output

    async def _fetch_rewards_via_func(self, *args: Any) -> Any:
        return await self._noted(super()._fetch_rewards_via_func(*args))

    async def _fetch_rewards_via_http(self, *args: Any) -> Any:
        return await self._noted(super()._fetch_rewards_via_http(*args))

    async def _noted(self, rewards: Awaitable[Any]) -> Any:
        try:
            return await rewards
        except Exception as error:  # a user's code may raise anything; upstream would go on without a reward
            if isinstance(error, _LateError):
                late = f"did not answer within {self._limit_s:g} s (--limits.reward_s)"
                _failure.get().append(RewardLateError(late))
            else:
                _failure.get().append(RewardError(f"raised {named(error.__cause__ or error)}"))
            raise


def given_up_after(limit_s: float, reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function with a limit: after `limit_s` seconds it is asked again, for the same response.

    The first answer counts. After as long once more it raises _LateError and leaves the hanging calls behind.
    """

    @functools.wraps(reward_func)
    def call(*args: Any, **kwargs: Any) -> Any:
        answers = []
        for _ in range(ATTEMPTS):
            thread = ThreadPoolExecutor(1, "reward")
            answers.append(thread.submit(contextvars.copy_context().run, reward_func, *args, **kwargs))
            thread.shutdown(wait=False)
            done, _ = wait(answers, limit_s, FIRST_COMPLETED)
            if done:
                return _result(done.pop())
        raise _LateError

    return call


def _result(answer: Future[Any]) -> Any:
    error = answer.exception()
    if error is not None and not isinstance(error, Exception):
        raise _ExitError from error
    return answer.result()


def check_response(response: dict[str, Any]) -> None:
    """Raise RewardError unless a response's reward, scores and extra logs are finite numbers; make the reward a float.

    None: a model rewards it later. An agent may leave them out. Scores may be several numbers.
    """
    prompt = shown(response["prompt"])
    if response.get("reward") is not None:
        response["reward"] = _number(response["reward"], f"the reward for {prompt}")
    scores = response.get("scores")
    if scores is not None:
        several = hasattr(scores, "__len__") and not isinstance(scores, str | bytes) and getattr(scores, "ndim", 1) > 0
        numbers = [_number(score, f"a score for {prompt}") for score in (scores if several else [scores])]
        response["scores"] = numbers[0] if len(numbers) == 1 else numbers
    logs = response.get("extra_logs")
    if logs is not None and not isinstance(logs, Mapping):
        raise RewardError(f"the extra_logs for {prompt} are {_cut(logs)}: they must be a dictionary of numbers")
    for key, value in (logs or {}).items():
        _number(value, f"extra_logs[{key!r}] for {prompt}", finite=False)


def _number(value: Any, what: str, finite: bool = True) -> float:
    """Return a number as a float, also one in a tensor or an array of one. Raises RewardError."""
    try:
        # Texts of digits are no numbers; tensors and arrays of several raise.
        number = float("no number" if isinstance(value, str | bytes) else getattr(value, "item", lambda: value)())
    except (TypeError, ValueError, RuntimeError):
        raise RewardError(f"{what} is {_cut(value)}: it must be one number") from None
    if finite and not math.isfinite(number):
        raise RewardError(f"{what} is {number}: it must be a finite number")
    return number


def _cut(value: Any) -> str:
    return repr(value)[:SHOWN_PROMPT]


def named(error: BaseException) -> str:
    """Return an error of a user's code in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def shown(prompt: str) -> str:
    """Return the prompt as messages show it."""
    line = " ".join(prompt.split())
    return f"prompt {line[:SHOWN_PROMPT]!r}" + ("..." if len(line) > SHOWN_PROMPT else "")
