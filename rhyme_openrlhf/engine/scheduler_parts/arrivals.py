"""vLLM scheduler plug-in: what a move needs of the scheduler at its destination. Base of moves.py.

Blocks and a seat in the batch are held for a sample that is to come, by reference: nobody else gets them. A sample that
comes is a new request whose first response tokens are there already; one that is expected becomes that between two
steps, as soon as its engine has handed it over (kv/handover.py). Those of one convoy go on together, when the last of
them is handed over or an order asks for one: their engines' devices may be this one's.

Invariants: every order may be given twice; a reservation keeps one seat free (`engine/patches/queues.py`), so that
there is always one to go on with; no KV block survives a reset of the prefix cache (a weight load): arrivals recompute
then, and reservations are void; an engine that only expects samples runs no model: not even an empty step, for which
its workers would stay awake and take the processors of those who are to hand over.
Checked against vLLM 0.29.0 and 0.32.0 `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`, and
`v1/engine/core.py`, whose loop asks `has_requests` before it waits for a call, and again in a step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from rhyme_openrlhf.engine.messages import ARRIVED, Arrival
from rhyme_openrlhf.engine.patches import queues
from rhyme_openrlhf.engine.request_keys import WINDOW
from rhyme_openrlhf.engine.scheduler import Metering
from rhyme_openrlhf.engine.scheduler_parts.status_figures import StatusFigures
from rhyme_openrlhf.kv.buffer import KvBuffer, read_handover
from rhyme_openrlhf.kv.handover import Handover

# Of arrivals whose first token, or whose handover, nobody asked for.
ARRIVALS_KEPT = 1024
# An engine with nothing else to do looks so often for what it expects (a look takes some 30 microseconds a sample), and
# so long at most, because its process has signals to see to.
LOOK_SECONDS = 0.0005
LOOKING_SECONDS = 0.05


def keep(of: dict[str, Any], request_id: str, value: Any) -> None:
    """Note something of an arrival, for the last ARRIVALS_KEPT of them."""
    of[request_id] = value
    while len(of) > ARRIVALS_KEPT:
        del of[next(iter(of))]


class ArrivingScheduler(Metering, Scheduler):
    """Holding room; arrivals."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # All set before each call from the engine's owner (engine/patches/core_channel.py): calls a method of the
        # workers; says whether another call waits; and tells the engine whether it may wait for one while it has no
        # requests. Without the latter two (an engine in its owner's process, which steps it) an engine looks out in
        # empty steps.
        self.call_workers: Any = None
        self.is_called: Any = None
        self.wait_for_calls: Any = None
        # Blocks by reservation; None: void, its blocks are gone. And how many tokens of KV cache lie in them.
        self._rooms: dict[str, list[Any] | None] = {}
        self._filled: dict[str, int] = {}
        # Arrivals that are handed over by their engines, before that; and how those fared that were: the response
        # tokens they brought, and why their KV cache is computed again ("": it is not).
        self._expected: dict[str, Any] = {}
        self._gone_on: dict[str, tuple[int, str]] = {}
        # Arrivals with KV blocks that no step has met yet.
        self._arrived: set[str] = set()
        self._reports = StatusFigures()
        # Arrivals without a token made here yet, and when (unix seconds) the others had theirs.
        self._no_token: set[str] = set()
        self._first_tokens: dict[str, float] = {}

    def hold_room(self, name: str, tokens: int) -> str:
        """Hold a seat and the blocks of `tokens` tokens as reservation `name`, or let it grow to that many.

        Returns "" or one sentence that says why there is no room (a reservation that was there stays as it was).
        """
        blocks = self._rooms.get(name, [])
        if blocks is None:
            return "the reservation is void: the KV cache was given up since"
        pool, needed = self.kv_cache_manager.block_pool, -(-tokens // self.block_size) - len(blocks)
        if name not in self._rooms and len(self.running) >= queues.seats(self):
            return f"all {queues.seats(self)} seats are taken"
        if needed > pool.get_num_free_blocks():
            return f"{needed} KV blocks are needed, {pool.get_num_free_blocks()} are free"
        if name not in self._rooms:
            self._rooms[name] = blocks
            queues.hold_seats(self, 1)
        if needed > 0:
            blocks += pool.get_new_blocks(needed)
        return ""

    def release_room(self, name: str) -> None:
        """Give a reservation up, if there is one."""
        blocks = self._take_room(name)
        if blocks:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def room_blocks(self, name: str) -> list[int]:
        """The numbers of the blocks that reservation `name` holds, in order; none if there is no such reservation."""
        return [block.block_id for block in self._rooms.get(name) or ()]

    def import_rows(self, name: str, buffer: dict[str, Any], first: int, end: int) -> str:
        """Have rows `first` to `end` of a buffer copied into a reservation, which grows to hold them; "" or why not."""
        return self.import_all([(name, buffer, first, end)])[0]

    def import_all(self, rows: Sequence[tuple[str, dict[str, Any], int, int]]) -> list[str]:
        """The same of several samples, with one order to the workers: what each of them answers takes as long."""
        problems = [self.hold_room(name, end * self.block_size) for name, _, _, end in rows]
        copies = [
            (place, (self.room_blocks(name)[first:end], buffer, first))
            for place, (name, buffer, first, end) in enumerate(rows)
            if not problems[place] and end > first
        ]
        if copies:
            ranks = self.call_workers("rhyme_import_all", args=([copy for _, copy in copies],))
            for (place, _), of_ranks in zip(copies, zip(*ranks, strict=True), strict=True):
                problems[place] = next((answer for answer in of_ranks if answer), "")
        for (name, _, first, end), problem in zip(rows, problems, strict=True):
            if not problem and self._filled.get(name, 0) >= first * self.block_size:
                self._filled[name] = max(end * self.block_size, self._filled.get(name, 0))
        return problems

    def seats(self) -> int:
        """Samples that can run at once, beside those that moves keep a seat for."""
        return queues.seats(self)

    def rooms(self) -> list[str]:
        """The reservations there are."""
        return list(self._rooms)

    def _take_room(self, name: str) -> list[Any]:
        if name in self._rooms:
            queues.hold_seats(self, -1)
        self._filled.pop(name, None)
        return self._rooms.pop(name, None) or []

    def add_request(self, request: Any) -> None:
        """As vLLM, and a sample that ran elsewhere goes on with what it has generated, before those that wait."""
        arrival = Arrival.of(request.sampling_params) if request.request_id not in self.requests else None
        if arrival is None:
            super().add_request(request)
        elif arrival.buffer is not None:
            self._expected[request.request_id] = request
        else:
            self._go_on(request, arrival)

    def expects(self, request_id: str) -> bool:
        """Whether an arrival waits to be handed over."""
        return request_id in self._expected

    def gone_on(self, request_id: str) -> tuple[int, str] | None:
        """With how many response tokens an expected arrival has gone on, and why its KV cache is computed again.

        None if it was not handed over (yet). Its convoy waits for nobody else any more.
        """
        self._take_handovers(request_id)
        return self._gone_on.get(request_id)

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

    def _look_out(self) -> None:
        """With nothing else to do: wait for what is handed over, or for a call, and not long."""
        self._take_handovers()
        limit = time.monotonic() + LOOKING_SECONDS
        while self._expected and not super().has_requests() and not self.is_called() and time.monotonic() < limit:
            time.sleep(LOOK_SECONDS)
            self._take_handovers()

    def _go_on(self, request: Any, arrival: Arrival) -> None:
        request.append_output_token_ids(list(arrival.tokens))
        self._reports.came(request.request_id, len(arrival.tokens))
        # vLLM's statistics of prompts: this is none.
        request.prefill_stats = None
        filled = self._filled.get(arrival.room, 0)
        blocks = self._take_room(arrival.room)
        self._no_token.add(request.request_id)
        # What did not get in is computed again.
        if 0 < arrival.computed <= min(filled, len(blocks) * self.block_size):
            self._move_in(request, blocks, arrival.computed)
        elif blocks:
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))
        super().add_request(request)
        queues.put_first(self, request)

    def _move_in(self, request: Any, blocks: list[Any], computed: int) -> None:
        """As vLLM does when a request's KV cache has come from elsewhere (WAITING_FOR_REMOTE_KVS)."""
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        manager.req_to_blocks[request.request_id] = blocks
        request.num_computed_tokens = min(computed, request.num_tokens - 1)
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        self._arrived.add(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._expected:
            self._take_handovers()
        now = time.perf_counter()
        output = super().schedule(*args, **kwargs)
        if self._arrived:
            self._arrived.difference_update(output.num_scheduled_tokens)
        self._reports.scheduled(output, self.requests, now)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        if not self.running:
            self._reports.interrupted()
        if self._no_token:
            for client in outputs.values():
                for output in client.outputs:
                    if output.new_token_ids and output.request_id in self._no_token:
                        self._no_token.discard(output.request_id)
                        keep(self._first_tokens, output.request_id, time.time())
        return outputs

    def has_requests(self) -> bool:
        """As vLLM; and an engine with nothing else to do looks out for what it expects, before it answers."""
        if super().has_requests():
            return True
        expecting = bool(self._expected) and self._pause_state is PauseState.UNPAUSED
        if self.is_called is None:
            return expecting
        self.wait_for_calls(not expecting)
        if expecting:
            self._look_out()
        return super().has_requests()

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Any]:
        """As vLLM; and such arrivals are expected no more."""
        ids = {request_ids} if isinstance(request_ids, str) else request_ids
        for request_id in list(self._expected) if ids is None else ids:
            self._expected.pop(request_id, None)
        return super().finish_requests(ids, finished_status)

    def take_first_token(self, request_id: str) -> float | None:
        """When an arrival had its first token here, unix seconds, told once; None: not yet."""
        return self._first_tokens.pop(request_id, None)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._arrived.discard(request.request_id)
        self._no_token.discard(request.request_id)
        self._reports.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    # --- weights

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As vLLM; and what moves keep of KV blocks goes too, because it was made by the weights of before."""
        self._filled.clear()
        # Their engines resume them: no weight version goes on with what another one generated.
        self._expected.clear()
        for name, blocks in self._rooms.items():
            self._rooms[name] = None
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks or []))
        if reset_running_requests:
            for request_id in list(self._arrived):
                self._recompute(self.requests[request_id])
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _recompute(self, request: Any) -> None:
        if request.status == RequestStatus.RUNNING:
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            queues.take_out(self, request)
        elif request.request_id in self._arrived:
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            queues.gave_up_kv(self, request)
            self._arrived.discard(request.request_id)
