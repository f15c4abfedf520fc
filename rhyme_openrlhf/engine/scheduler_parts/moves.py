"""The part of the scheduler that moves samples: what a move needs at its source and at its destination.

**Source.** A sample can be stopped and kept: it is in no queue, so it is not scheduled, but it is a request like any
other, with its KV blocks.

**Destination.** Blocks and a seat in the batch are held for a sample that is to come, so nobody else gets them. The
sample is a new request that has its first response tokens already. An expected sample becomes such a request between
two steps, as soon as its engine has handed it over (kv/buffer.py). Samples of one convoy go on together, because
their engines' devices may be this one's: when the last of them is handed over, or an order asks for one.

Invariants:
- Every order may be given twice.
- A reservation keeps one seat free, and so does a sample that was stopped while it ran (engine/patches/queues.py). So
  there is always a seat to go on with.
- No KV block survives a reset of the prefix cache (a weight load): arrivals and stopped samples recompute then, and
  reservations are void.
- An engine that only expects samples runs no model, not even an empty step. Its workers would stay awake for the step
  and take the processors of those who are to hand over.

Checked against vLLM 0.29.0 and 0.32.0 `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`, and
`v1/engine/core.py`, whose loop asks `has_requests` before it waits for a call, and again in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from rhyme_openrlhf.engine.calls import SchedulerMoves, WorkerCalls
from rhyme_openrlhf.engine.messages import ARRIVED, Arrival
from rhyme_openrlhf.engine.patches import queues
from rhyme_openrlhf.engine.patches.core_channel import EngineCoreAccess
from rhyme_openrlhf.engine.requests import UNCOUNTED, WINDOW
from rhyme_openrlhf.engine.scheduler_parts import DecodeStep, Part
from rhyme_openrlhf.engine.scheduler_parts.drafting import Drafting
from rhyme_openrlhf.engine.scheduler_parts.meter import Meter, StatusFigures, extra_arguments
from rhyme_openrlhf.kv.buffer import Handover, KvBuffer, read_handover, write_handover

# Of arrivals whose first token, or whose handover, nobody asked for.
ARRIVALS_KEPT = 1024
# Interval at which an idle engine polls for expected samples: a poll takes some 30 microseconds a sample. The longest
# time that it polls follows, because its process has signals to handle.
LOOK_SECONDS = 0.0005
LOOKING_SECONDS = 0.05


def keep(of: dict[str, Any], request_id: str, value: Any) -> None:
    """Note something of an arrival, for the last ARRIVALS_KEPT of them."""
    of[request_id] = value
    while len(of) > ARRIVALS_KEPT:
        del of[next(iter(of))]


class Moves(Part):
    """The samples of one engine that leave, arrive or are kept, and the engine's status."""

    calls = SchedulerMoves

    def __init__(
        self, scheduler: Any, core: EngineCoreAccess, meter: Meter, figures: StatusFigures, drafting: Drafting | None
    ) -> None:
        self._scheduler, self._core = scheduler, core
        self._meter, self._figures, self._drafting = meter, figures, drafting
        # Blocks by reservation; None: void, its blocks are gone. And how many tokens of KV cache lie in them.
        self._rooms: dict[str, list[Any] | None] = {}
        self._filled: dict[str, int] = {}
        # Arrivals that their engines will hand over. And outcomes of handovers: the response tokens that came, and why
        # the KV cache is computed again ("": it is not).
        self._expected: dict[str, Any] = {}
        self._gone_on: dict[str, tuple[int, str]] = {}
        # Arrivals with KV blocks that no step has met yet.
        self._arrived: set[str] = set()
        # Arrivals without a token made here yet, and when (unix seconds) the others had theirs.
        self._no_token: set[str] = set()
        self._first_tokens: dict[str, float] = {}
        # Stopped requests, and whether each keeps a seat: one that had none yet must not take another's.
        self._stopped: dict[str, bool] = {}

    # --- status

    def status(self) -> dict[str, Any]:
        """Return what an EngineStatus is made of, as plain values; means are of the time since the last call."""
        samples = []
        for request_id, request in self._scheduler.requests.items():
            if not request.is_finished() and not extra_arguments(request).get(UNCOUNTED):
                waiting = request.status != RequestStatus.RUNNING
                accepted = self._figures.accepted_per_step(request_id, request.num_output_tokens)
                samples.append((request_id, request.num_tokens, accepted, waiting))
        return {
            "samples": samples,
            "free_tokens": self._pool.get_num_free_blocks() * self._scheduler.block_size,
            "free_seats": max(queues.seats(self._scheduler) - len(self._scheduler.running), 0),
            "step_tokens": self._scheduler.max_num_scheduled_tokens,
            **self._figures.take(self._meter.counters()),
        }

    # --- source

    def can_carry_kv(self) -> bool:
        """Return whether KV blocks of this model can go elsewhere: one kind of attention, over the whole context."""
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        return len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec

    def export_full(self, request_id: str, buffer: dict[str, Any]) -> tuple[int, str] | None:
        """Copy the blocks of a request that change no more to the first rows of a buffer, while it goes on.

        Returns how many, and "" or why not; None if there is no such unfinished request.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        blocks = self._blocks(request)[: self._final_tokens(request) // self._scheduler.block_size]
        return len(blocks), self._export(blocks, buffer, 0)

    def _export(self, blocks: list[int], buffer: dict[str, Any], first: int) -> str:
        answers = self._core.workers(WorkerCalls.rhyme_export_kv, blocks, buffer, first) if blocks else []
        return next((answer for answer in answers if answer), "")

    def stop_sample(
        self, request_id: str, buffer: dict[str, Any] | None = None, first: int = 0, hand_over: bool = False
    ) -> dict[str, Any] | None:
        """Schedule a request no more, and keep it; None if there is no such unfinished request, or not yet.

        Not yet: steps under way have it, and what they sample is to be known. The caller asks again.
        With a `buffer` its blocks from number `first` on are copied there, and with `hand_over` the engine that expects
        it goes on with it. `output`: its response tokens, in number; `computed`, `blocks`, `problem`: as `Stopped`;
        `at`: when it stopped, on this node's monotonic clock; `window`: of its speculation, None without speculation;
        `generator`: of its seeded random numbers.
        """
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        if request_id not in self._stopped:
            self._stopped[request_id] = seated = queues.take_out(self._scheduler, request)
            queues.hold_seats(self._scheduler, seated)
        if request.num_in_flight_tokens:
            return None
        at, computed = time.monotonic(), self._final_tokens(request)
        blocks = self._blocks(request)[: -(-computed // self._scheduler.block_size)]
        window = None if self._drafting is None else self._drafting.source.window(request_id)
        generator = None
        if request.sampling_params.seed is not None:
            generator = self._core.workers(WorkerCalls.rhyme_generator_state, request_id)[0]
        problem = self._export(blocks[first:], buffer, first) if buffer else ""
        if buffer and hand_over and computed and not problem:
            tokens = list(request.output_token_ids)
            handed = Handover(tokens, computed, len(blocks), window, generator)
            try:
                write_handover(KvBuffer.from_plain(buffer), handed)
            except OSError as error:
                problem = f"the sample was not handed over: {error}"
        return {
            "output": request.num_output_tokens, "computed": computed, "blocks": len(blocks), "problem": problem,
            "at": at, "window": window, "generator": generator,
        }  # fmt: skip

    def resume_sample(self, request_id: str) -> bool:
        """Schedule a stopped request again; False if there is no such unfinished request."""
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            return False
        if request_id in self._stopped:
            self._forget_stop(request_id)
            queues.put_back(self._scheduler, request)
        return True

    @property
    def _pool(self) -> Any:
        return self._scheduler.kv_cache_manager.block_pool

    def _final_tokens(self, request: Any) -> int:
        # What steps under way have computed may still be rejected.
        return min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)

    def _blocks(self, request: Any) -> list[int]:
        if not self.can_carry_kv():
            return []
        return list(self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0])

    def _forget_stop(self, request_id: str) -> None:
        queues.hold_seats(self._scheduler, -self._stopped.pop(request_id, False))

    # --- destination

    def hold_room(self, name: str, tokens: int) -> str:
        """Hold a seat and the blocks of `tokens` tokens as reservation `name`, or let it grow to that many.

        Returns "" or one sentence that says why there is no room (a reservation that was there stays as it was).
        """
        blocks = self._rooms.get(name, [])
        if blocks is None:
            return "the reservation is void: the KV cache was given up since"
        needed, free = -(-tokens // self._scheduler.block_size) - len(blocks), self._pool.get_num_free_blocks()
        seats = queues.seats(self._scheduler)
        if name not in self._rooms and len(self._scheduler.running) >= seats:
            return f"all {seats} seats are taken"
        if needed > free:
            return f"{needed} KV blocks are needed, {free} are free"
        if name not in self._rooms:
            self._rooms[name] = blocks
            queues.hold_seats(self._scheduler, 1)
        if needed > 0:
            blocks += self._pool.get_new_blocks(needed)
        return ""

    def release_room(self, name: str) -> None:
        """Give a reservation up, if there is one."""
        blocks = self._take_room(name)
        if blocks:
            self._pool.free_blocks(reversed(blocks))

    def room_blocks(self, name: str) -> list[int]:
        """Return the numbers of the blocks that reservation `name` holds, in order; none if there is none."""
        return [block.block_id for block in self._rooms.get(name) or ()]

    def import_rows(self, name: str, buffer: dict[str, Any], first: int, end: int) -> str:
        """Have rows `first` to `end` of a buffer copied into a reservation, which grows to hold them; "" or why not."""
        return self.import_all([(name, buffer, first, end)])[0]

    def import_all(self, rows: Sequence[tuple[str, dict[str, Any], int, int]]) -> list[str]:
        """Do the same for several samples, with one order to the workers: what each of them answers takes as long."""
        problems = [self.hold_room(name, end * self._scheduler.block_size) for name, _, _, end in rows]
        copies = [
            (place, (self.room_blocks(name)[first:end], buffer, first))
            for place, (name, buffer, first, end) in enumerate(rows)
            if not problems[place] and end > first
        ]
        if copies:
            ranks = self._core.workers(WorkerCalls.rhyme_import_all, [copy for _, copy in copies])
            for (place, _), of_ranks in zip(copies, zip(*ranks, strict=True), strict=True):
                problems[place] = next((answer for answer in of_ranks if answer), "")
        for (name, _, first, end), problem in zip(rows, problems, strict=True):
            if not problem and self._filled.get(name, 0) >= first * self._scheduler.block_size:
                self._filled[name] = max(end * self._scheduler.block_size, self._filled.get(name, 0))
        return problems

    def seats(self) -> int:
        """Return how many samples can run at once, beside those that moves keep a seat for."""
        return queues.seats(self._scheduler)

    def rooms(self) -> list[str]:
        """Return the reservations there are."""
        return list(self._rooms)

    def _take_room(self, name: str) -> list[Any]:
        if name in self._rooms:
            queues.hold_seats(self._scheduler, -1)
        self._filled.pop(name, None)
        return self._rooms.pop(name, None) or []

    def expects(self, request_id: str) -> bool:
        """Return whether an arrival waits to be handed over."""
        return request_id in self._expected

    def gone_on(self, request_id: str) -> tuple[int, str] | None:
        """Return with how many response tokens an expected arrival has gone on, and why its KV cache is computed again.

        None if it was not handed over (yet). Its convoy waits for nobody else any more.
        """
        self._take_handovers(request_id)
        return self._gone_on.get(request_id)

    def take_first_token(self, request_id: str) -> float | None:
        """Return when an arrival had its first token here, on this node's monotonic clock, once; None: not yet."""
        return self._first_tokens.pop(request_id, None)

    def _take_handovers(self, asked: str = "") -> None:
        """Go on with what was handed over: the destination's part of the stop at the source."""
        expected: dict[str, tuple[Arrival, dict[str, Any], Handover | None]] = {}
        for name, request in self._expected.items():
            arrival = Arrival.of(request.sampling_params)
            assert arrival is not None and arrival.buffer is not None
            expected[name] = arrival, arrival.buffer, read_handover(KvBuffer.from_plain(arrival.buffer))
        waits = {arrival.convoy for arrival, _, handed in expected.values() if handed is None} - {""}
        if asked in expected:
            waits.discard(expected[asked][0].convoy)
        ready = [
            (name, arrival, buffer, handed)
            for name, (arrival, buffer, handed) in expected.items()
            if handed is not None and arrival.convoy not in waits
        ]
        rows = [(arrival.room, buffer, arrival.first, handed.blocks) for _, arrival, buffer, handed in ready]
        for (name, arrival, _, handed), problem in zip(ready, self.import_all(rows), strict=True):
            self._take_handover(name, arrival, handed, problem)

    def _take_handover(self, request_id: str, expected: Arrival, came: Handover, problem: str) -> None:
        request, computed = self._expected.pop(request_id), 0 if problem else came.computed
        arrival = Arrival(tuple(came.tokens), expected.room, computed, came.generator)
        extra = request.sampling_params.extra_args
        request.sampling_params.extra_args = {**extra, ARRIVED: arrival.to_plain(), WINDOW: came.window}
        self._go_on(request, arrival)
        keep(self._gone_on, request_id, (len(came.tokens), problem))

    def _look_out(self, is_called: Callable[[], bool]) -> None:
        """Wait for what is handed over, or for a call, and not long."""
        self._take_handovers()
        limit = time.monotonic() + LOOKING_SECONDS
        while self._expected and not self._has_requests() and not is_called() and time.monotonic() < limit:
            time.sleep(LOOK_SECONDS)
            self._take_handovers()

    def _go_on(self, request: Any, arrival: Arrival) -> None:
        request.append_output_token_ids(list(arrival.tokens))
        # vLLM's statistics of prompts: this is none.
        request.prefill_stats = None
        filled = self._filled.get(arrival.room, 0)
        blocks = self._take_room(arrival.room)
        self._no_token.add(request.request_id)
        # What did not get in is computed again.
        if 0 < arrival.computed <= min(filled, len(blocks) * self._scheduler.block_size):
            self._move_in(request, blocks, arrival.computed)
        elif blocks:
            self._pool.free_blocks(reversed(blocks))
        self._scheduler.take_in(request)
        queues.put_first(self._scheduler, request)

    def _move_in(self, request: Any, blocks: list[Any], computed: int) -> None:
        """Give a request KV blocks that came from elsewhere, as vLLM does (WAITING_FOR_REMOTE_KVS)."""
        (manager,) = self._scheduler.kv_cache_manager.coordinator.single_type_managers
        manager.req_to_blocks[request.request_id] = blocks
        request.num_computed_tokens = min(computed, request.num_tokens - 1)
        self._scheduler.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        self._arrived.add(request.request_id)

    # --- what the scheduler tells

    def takes(self, request: Any) -> bool:
        """Add a sample that ran elsewhere: it goes on with what it has generated, before those that wait."""
        arrival = Arrival.of(request.sampling_params)
        if arrival is None:
            return False
        if arrival.buffer is not None:
            self._expected[request.request_id] = request
        else:
            self._go_on(request, arrival)
        return True

    def before_schedule(self) -> None:
        if self._expected:
            self._take_handovers()

    def scheduled(self, output: Any, before: DecodeStep | None) -> None:
        if self._arrived:
            self._arrived.difference_update(output.num_scheduled_tokens)

    def sampled(self, requests: Sequence[str], tokens: Sequence[Sequence[int]]) -> None:
        if self._no_token:
            for request_id, new in zip(requests, tokens, strict=False):
                if new and request_id in self._no_token:
                    self._no_token.discard(request_id)
                    keep(self._first_tokens, request_id, time.monotonic())

    def looks_out(self) -> bool:
        """Wait a moment for what is expected, or for a call, in an engine with nothing else to do."""
        expecting = bool(self._expected) and self._scheduler._pause_state is PauseState.UNPAUSED
        core = self._core
        if core.is_called is None or core.wait_for_calls is None:
            return expecting
        core.wait_for_calls(not expecting)
        # With asynchronous scheduling the results of the last step may be still to come.
        if expecting and not core.computes():
            self._look_out(core.is_called)
        return self._has_requests()

    def _has_requests(self) -> bool:
        return bool(Scheduler.has_requests(self._scheduler))

    def finishes(self, request_ids: Iterable[str] | None) -> None:
        """Expect such arrivals no more."""
        for request_id in list(self._expected) if request_ids is None else request_ids:
            self._expected.pop(request_id, None)

    def freed(self, request_id: str) -> None:
        self._forget_stop(request_id)
        self._arrived.discard(request_id)
        self._no_token.discard(request_id)

    def resets(self, running: bool) -> None:
        """Give up what moves keep of KV blocks too, because it was made by the weights of before."""
        self._filled.clear()
        # Their engines resume them: no weight version goes on with what another one generated.
        self._expected.clear()
        for name, blocks in self._rooms.items():
            self._rooms[name] = None
            self._pool.free_blocks(reversed(blocks or []))
        if running:
            for request_id in [*self._stopped, *self._arrived]:
                self._recompute(self._scheduler.requests[request_id])

    def _recompute(self, request: Any) -> None:
        if request.status == RequestStatus.RUNNING:
            self._scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
            queues.take_out(self._scheduler, request)
        elif request.request_id in self._arrived:
            self._scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            queues.gave_up_kv(self._scheduler, request)
            self._arrived.discard(request.request_id)
