"""A patch: drafts for a decode step that vLLM has scheduled already, in the second model runner (V2).

With asynchronous scheduling vLLM schedules a step while the one before it runs, so the scheduler cannot draft: it does
not know the last tokens. It keeps room for drafts with each sample instead. Before the step goes to the model, vLLM's
executor waits for the tokens of the step before and gives them to the scheduler's drafting, which fills the room
(`Late.fill`). What is computed is a copy of the step with as many rows as there are drafts. vLLM's scheduler goes on
with the step as it was scheduled: room that was not filled is to it a draft that was rejected. Before the executor
waits, a runner in the same process takes in what the step says of requests.

The executor lives in the scheduler's process, also where each rank of a tensor-parallel engine has a process of its
own. The ranks are sent the filled step in one message, so all of them compute the same. Scheduler and executor find
each other by vLLM's configuration.

Invariants:
- A step is filled once, in the order in which steps were scheduled, and never with more drafts than it has room for.
- Without drafts in the step the executor does what vLLM's own does.
Checked against vLLM 0.29.0 `v1/executor/uniproc_executor.py` and `v1/executor/multiproc_executor.py` (execute_model,
sample_tokens), `v1/engine/core.py` (step_with_batch_queue), `v1/worker/gpu/async_utils.py` (AsyncOutput),
`v1/core/sched/async_scheduler.py` and `config/vllm.py` (which methods may be scheduled asynchronously); contract test:
`tests/engine/patches/test_late_drafts.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import vllm.config.vllm
from numpy.typing import NDArray
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture, UniProcExecutor
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from rhyme_openrlhf.drafting.planner import Cut
from rhyme_openrlhf.drafting_core import core
from rhyme_openrlhf.engine.patches import second_runner
from rhyme_openrlhf.engine.patches.second_runner import METHOD

# Where a configuration has the engine's `Late`, and an executor the output of its last step.
LATE, SAMPLED = "rhyme_late", "rhyme_sampled"
# vLLM's names of executors that wait for a step's tokens where the scheduler is.
EXECUTORS = ("uni", "mp", "ray")


class Sampled(NamedTuple):
    """The tokens that a step sampled: its requests, how many tokens each has, and the tokens of all."""

    requests: list[str]
    counts: NDArray[np.int64]
    tokens: NDArray[np.int32]


NOTHING = Sampled([], np.empty(0, np.int64), np.empty(0, np.int32))


class Late(Protocol):
    """Drafting that fills a step after it was scheduled."""

    def fill(self, output: Any, sampled: Callable[[], Sampled]) -> Any:
        """Return the step (vLLM's SchedulerOutput) to compute in the place of `output`.

        `sampled` waits for what the step before sampled; nothing before the first. It is called once at most.
        """


def offer(vllm_config: Any, drafting: Late) -> None:
    """Have the executor of this configuration, in this process, ask `drafting`."""
    apply()
    setattr(vllm_config, LATE, drafting)


def fills(vllm_config: Any) -> bool:
    """Return whether the configured executor fills steps; of vLLM's two for Ray's actors the newer one does."""
    executor = Executor.get_class(vllm_config)
    # Of the first one's name vLLM's CPU platform makes another.
    named = vllm_config.parallel_config.distributed_executor_backend in (*EXECUTORS, UniProcExecutor)
    return named and issubclass(executor, (UniProcExecutor, MultiprocExecutor))


def late_of(executor: Any) -> Late | None:
    """Return the drafting that an executor asks; None: drafts come with the step, or there are none."""
    found: Late | None = getattr(executor.vllm_config, LATE, None)
    return found


class Room(NamedTuple):
    """Room for drafts in a scheduled step: requests that have some, tokens of it, and each request's other tokens."""

    requests: list[str]
    lengths: NDArray[np.int64]
    others: NDArray[np.int64]


def room_of(output: Any) -> Room:
    """Return the room that a scheduled step has for drafts."""
    room = output.scheduled_spec_decode_tokens
    lengths = np.fromiter(map(len, room.values()), np.int64, len(room))
    tokens = np.fromiter(map(output.num_scheduled_tokens.__getitem__, room), np.int64, len(room))
    return Room(list(room), lengths, tokens - lengths)


def filled(output: Any, room: Room, drafts: Cut) -> Any:
    """Return a copy of a scheduled step with a draft in the place of each room; `output` stays as it is.

    Of the drafts, vLLM's fields have the lengths alone (`second_runner.drafts_of`).
    """
    lengths = drafts.lengths.tolist()
    step = copy.copy(output)
    step.num_scheduled_tokens = output.num_scheduled_tokens.copy()
    step.num_scheduled_tokens.update(zip(room.requests, (room.others + drafts.lengths).tolist(), strict=True))
    step.total_num_scheduled_tokens = output.total_num_scheduled_tokens + drafts.flat.size - int(room.lengths.sum())
    places = [[0] * length for length in range(max(lengths, default=0) + 1)]
    drafting = itertools.compress(zip(room.requests, map(places.__getitem__, lengths), strict=True), lengths)
    step.scheduled_spec_decode_tokens = dict(drafting)
    setattr(step, second_runner.DRAFTS, Cut(drafts.lengths[drafts.lengths > 0], drafts.flat))
    return step


def tokens_of(output: AsyncOutput) -> Sampled:
    """Return what each request of a step sampled; waits for the device."""
    output.copy_event.synchronize()
    counts, rows = output.num_sampled_tokens_np.astype(np.int64), output.sampled_token_ids
    # Rows have room for the longest draft.
    tokens = core.cut(rows.astype(np.int32).ravel(), np.full(len(counts), rows.shape[1]), counts)
    return Sampled(output.model_runner_output.req_ids, counts, tokens)


def sampled_of(output: Any) -> Sampled:
    """Return the same of what vLLM's scheduler is given (ModelRunnerOutput)."""
    return Sampled(output.req_ids, *core.flatten(output.sampled_token_ids))


def awaited(future: Any) -> Sampled:
    """Return the same of a step that an executor computes; nothing of one that failed, which vLLM raises itself."""
    if isinstance(future, AsyncOutputFuture):
        return tokens_of(future.async_output)
    output = future.result()
    return NOTHING if output is None else sampled_of(output)


def _tokens(executor: Any, step: Any, before: Any) -> Sampled:
    """Return what the step `before` sampled; what needs no tokens of `step` is done first."""
    if isinstance(executor, UniProcExecutor):
        second_runner.update_ahead(executor.driver_worker.worker.model_runner, step)
    return NOTHING if before is None else awaited(before)


def allow() -> None:
    """Let vLLM schedule our method asynchronously, in this process."""
    module: Any = vllm.config.vllm
    # The methods whose drafts stay with the worker.
    module.NgramGPUTypes = Literal["ngram_gpu", METHOD]


class RunnerName(str):
    """The runner's name in vLLM's configuration: a process that is sent the configuration is patched for it.

    The engine core checks its configuration before it imports anything of ours.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return prepared, (str(self),)


def prepared(runner: str) -> RunnerName:
    """Let vLLM's configuration have the second runner, and schedule it asynchronously, in this process."""
    second_runner.apply()
    allow()
    return RunnerName(runner)


def apply() -> None:
    """Have vLLM's executors ask for drafts, in this process; once."""
    for executor in (UniProcExecutor, MultiprocExecutor):
        if not hasattr(executor, SAMPLED):
            _wrap(executor)


def _wrap(executor: Any) -> None:
    executed, sampled = executor.execute_model, executor.sample_tokens

    @functools.wraps(executed)
    def execute(self: Any, scheduler_output: Any, *more: Any, **named: Any) -> Any:
        late = late_of(self)
        if late is not None and scheduler_output.total_num_scheduled_tokens:
            before, self.rhyme_sampled = self.rhyme_sampled, None
            scheduler_output = late.fill(scheduler_output, functools.partial(_tokens, self, scheduler_output, before))
        return executed(self, scheduler_output, *more, **named)

    @functools.wraps(sampled)
    def sample(self: Any, *more: Any, **named: Any) -> Any:
        output = sampled(self, *more, **named)
        # Its tensors stay on the device for a step longer, so only where they are asked for.
        self.rhyme_sampled = output if late_of(self) is not None else None
        return output

    setattr(executor, SAMPLED, None)
    executor.execute_model, executor.sample_tokens = execute, sample
