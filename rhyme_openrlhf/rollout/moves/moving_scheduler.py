"""vLLM scheduler plug-in: what a move needs of a scheduler. Mixed into the run's own schedulers (rollout/scheduler.py).

At the source a sample can be stopped and kept: it is in no queue, so it is not scheduled, but it is a request like any
other with its KV blocks. At the destination blocks and a seat in the batch are held for a sample that is to come, by
reference: nobody else gets them. A sample that comes is a new request whose first response tokens are there already;
one that is expected becomes that between two steps, as soon as its engine has handed it over (handover.py).

Invariants: every order may be given twice; a sample that was stopped while it ran and a reservation each keep one seat
free (`max_num_running_reqs`), so that there is always one to go on with; no KV block survives a reset of the prefix
cache (a weight load): stopped samples and arrivals recompute then, and reservations are void.
Checked against vLLM 0.29.0 `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from rhyme_openrlhf.rollout.moves.handover import Handover
from rhyme_openrlhf.rollout.moves.kv_buffer import KvBuffer, read_handover, write_handover
from rhyme_openrlhf.rollout.moves.status_figures import StatusFigures
from rhyme_openrlhf.rollout.moves.travel import ARRIVED, Arrival
from rhyme_openrlhf.rollout.request_keys import UNCOUNTED, WINDOW
from rhyme_openrlhf.rollout.scheduler import HistoryScheduler, MeteredScheduler, Metering, extra_arguments
from rhyme_openrlhf.speculation.drafter import Verified
from rhyme_openrlhf.speculation.live_texts import Came

OF_MOVES = (
    "can_carry_kv", "hold_room", "release_room", "room_blocks", "import_rows", "full_blocks", "stop_sample",
    "resume_sample", "rooms", "seats", "take_first_token", "status", "expects", "gone_on",
)  # fmt: skip
# Of arrivals whose first token, or whose handover, nobody asked for.
ARRIVALS_KEPT = 1024


def keep(of: dict[str, Any], request_id: str, value: Any) -> None:
    """Note something of an arrival, for the last ARRIVALS_KEPT of them."""
    of[request_id] = value
    while len(of) > ARRIVALS_KEPT:
        del of[next(iter(of))]


class MovingScheduler(Metering, Scheduler):
    """Stopping, keeping, resuming; holding room; arrivals; what is told of the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Set before each call from the engine's owner (engine_core_channel.py): calls a method of the workers.
        self.call_workers: Any = None
        # Blocks by reservation; None: void, its blocks are gone. And how many tokens of KV cache lie in them.
        self._rooms: dict[str, list[Any] | None] = {}
        self._filled: dict[str, int] = {}
        # Stopped requests, and whether each keeps a seat: one that had none yet must not take another's.
        self._stopped: dict[str, bool] = {}
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

    # --- destination

    def hold_room(self, name: str, tokens: int) -> str:
        """Hold a seat and the blocks of `tokens` tokens as reservation `name`, or let it grow to that many.

        Returns "" or one sentence that says why there is no room (a reservation that was there stays as it was).
        """
        blocks = self._rooms.get(name, [])
        if blocks is None:
            return "the reservation is void: weights were loaded since"
        pool, needed = self.kv_cache_manager.block_pool, -(-tokens // self.block_size) - len(blocks)
        if name not in self._rooms and len(self.running) >= self.max_num_running_reqs:
            return f"all {self.max_num_running_reqs} seats are taken"
        if needed > pool.get_num_free_blocks():
            return f"{needed} KV blocks are needed, {pool.get_num_free_blocks()} are free"
        if name not in self._rooms:
            self._rooms[name] = blocks
            self.max_num_running_reqs -= 1
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
        refused = self.hold_room(name, end * self.block_size)
        if refused:
            return refused
        problem = self._copied("rhyme_import_kv", self.room_blocks(name)[first:end], buffer, first)
        if not problem and self._filled.get(name, 0) >= first * self.block_size:
            self._filled[name] = end * self.block_size
        return problem

    def _copied(self, method: str, blocks: list[int], buffer: dict[str, Any], first: int) -> str:
        answers = self.call_workers(method, args=(blocks, buffer, first)) if blocks else []
        return next((answer for answer in answers if answer), "")

    def seats(self) -> int:
        """Samples that can run at once, beside those that moves keep a seat for."""
        return self.max_num_running_reqs

    def rooms(self) -> list[str]:
        """The reservations there are."""
        return list(self._rooms)

    def _take_room(self, name: str) -> list[Any]:
        if name in self._rooms:
            self.max_num_running_reqs += 1
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

        None if it was not handed over (yet).
        """
        self._take_handovers()
        return self._gone_on.get(request_id)

    def _take_handovers(self) -> None:
        """Go on with what was handed over: the destination's part of the stop at the source."""
        for request_id, request in list(self._expected.items()):
            expected = Arrival.of(request.sampling_params)
            assert expected is not None and expected.buffer is not None
            came = read_handover(KvBuffer.from_plain(expected.buffer))
            if came is None:
                continue
            del self._expected[request_id]
            problem = ""
            if came.blocks > expected.first:
                problem = self.import_rows(expected.room, expected.buffer, expected.first, came.blocks)
            computed = 0 if problem else came.computed
            arrival = Arrival(tuple(came.tokens), expected.room, computed, came.generator)
            extra = request.sampling_params.extra_args
            request.sampling_params.extra_args = {**extra, ARRIVED: arrival.to_plain(), WINDOW: came.window}
            self._go_on(request, arrival)
            keep(self._gone_on, request_id, (len(came.tokens), problem))

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
        self.waiting.remove_request(request)
        self.waiting.prepend_request(request)

    def _move_in(self, request: Any, blocks: list[Any], computed: int) -> None:
        """As vLLM does when a request's KV cache has come from elsewhere (WAITING_FOR_REMOTE_KVS)."""
        (manager,) = self.kv_cache_manager.coordinator.single_type_managers
        manager.req_to_blocks[request.request_id] = blocks
        request.num_computed_tokens = min(computed, request.num_tokens - 1)
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        self._arrived.add(request.request_id)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        now = time.perf_counter()
        if self._expected:
            self._take_handovers()
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
        """As vLLM; and an engine with nothing else to do steps on, so that it sees a handover."""
        return super().has_requests() or (bool(self._expected) and self._pause_state is PauseState.UNPAUSED)

    def finish_requests(self, request_ids: Any, finished_status: RequestStatus) -> list[Any]:
        """As vLLM; and such arrivals are expected no more."""
        ids = {request_ids} if isinstance(request_ids, str) else request_ids
        for request_id in list(self._expected) if ids is None else ids:
            self._expected.pop(request_id, None)
        return super().finish_requests(ids, finished_status)

    def take_first_token(self, request_id: str) -> float | None:
        """When an arrival had its first token here, unix seconds, told once; None: not yet."""
        return self._first_tokens.pop(request_id, None)

    # --- what is told of this engine

    def status(self) -> dict[str, Any]:
        """What an EngineStatus is made of, as plain values; means are of the time since the last call."""
        samples = []
        for request_id, request in self.requests.items():
            if not request.is_finished() and not extra_arguments(request).get(UNCOUNTED):
                waiting = request.status != RequestStatus.RUNNING
                accepted = self._reports.accepted_per_step(request_id, request.num_output_tokens)
                samples.append((request_id, request.num_tokens, accepted, waiting))
        pool = self.kv_cache_manager.block_pool
        return {
            "samples": samples,
            "free_tokens": pool.get_num_free_blocks() * self.block_size,
            "free_seats": max(self.max_num_running_reqs - len(self.running), 0),
            "step_tokens": self.max_num_scheduled_tokens,
            **self._reports.take(self.meter.counters()),
        }

    def on_verified(self, drafts: Verified) -> Came:
        """As its base, and counted for the samples."""
        for request_id, accepted in zip(drafts.requests, drafts.accepted, strict=True):
            self._reports.accepted(request_id, accepted)
        return super().on_verified(drafts)

    # --- source

    def can_carry_kv(self) -> bool:
        """Whether KV blocks of this model can go elsewhere: one kind of attention, over the whole context."""
        groups = self.kv_cache_config.kv_cache_groups
        return len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec

    def full_blocks(self, request_id: str) -> dict[str, Any] | None:
        """The blocks of a request that change no more: `blocks`, and `preemptions` after which that is not true.

        None if there is no such unfinished request.
        """
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        full = self._final_tokens(request) // self.block_size
        return {"blocks": self._blocks(request)[:full], "preemptions": request.num_preemptions}

    def stop_sample(
        self, request_id: str, buffer: dict[str, Any] | None = None, first: int = 0, hand_over: bool = False
    ) -> dict[str, Any] | None:
        """Schedule a request no more, and keep it; None if there is no such unfinished request.

        With a `buffer` its blocks from number `first` on are copied there, and with `hand_over` the engine that expects
        it goes on with it. `output`: its response tokens, in number; `computed`, `blocks`, `problem`, `at`: as
        `Stopped`; `window`: of its speculation, None without speculation; `generator`: of its seeded random numbers.
        """
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        if request_id not in self._stopped:
            seated = request.status == RequestStatus.RUNNING
            if seated:
                self.running.remove(request)
            else:
                self.waiting.remove_requests([request])
                self.skipped_waiting.remove_requests([request])
            self._stopped[request_id] = seated
            self.max_num_running_reqs -= seated
        at, computed = time.time(), self._final_tokens(request)
        blocks = self._blocks(request)[: -(-computed // self.block_size)]
        window, generator = self.window_of(request_id), None
        if request.sampling_params.seed is not None:
            generator = self.call_workers("rhyme_generator_state", args=(request_id,))[0]
        problem = self._copied("rhyme_export_kv", blocks[first:], buffer, first) if buffer else ""
        if buffer and hand_over and computed and not problem:
            tokens = list(request.output_token_ids)
            handed = Handover(tokens, computed, len(blocks), window, generator)
            problem = write_handover(KvBuffer.from_plain(buffer), handed)
        return {
            "output": request.num_output_tokens, "computed": computed, "blocks": len(blocks), "problem": problem,
            "at": at, "window": window, "generator": generator,
        }  # fmt: skip

    def resume_sample(self, request_id: str) -> bool:
        """Schedule a stopped request again; False if there is no such unfinished request."""
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return False
        if request_id in self._stopped:
            self._forget_stop(request_id)
            if request.status == RequestStatus.RUNNING:
                self.running.append(request)
            else:
                self.waiting.prepend_request(request)
        return True

    def window_of(self, request_id: str) -> int | None:
        """The size of a request's speculation window; None without speculation."""
        return None

    def _final_tokens(self, request: Any) -> int:
        # What steps under way have computed may still be rejected.
        return min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)

    def _blocks(self, request: Any) -> list[int]:
        if not self.can_carry_kv():
            return []
        return list(self.kv_cache_manager.get_block_ids(request.request_id)[0])

    def _forget_stop(self, request_id: str) -> None:
        self.max_num_running_reqs += self._stopped.pop(request_id, False)

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._forget_stop(request.request_id)
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
            for request_id in {*self._stopped, *self._arrived}:
                self._recompute(self.requests[request_id])
        return super().reset_prefix_cache(reset_running_requests, reset_connector)

    def _recompute(self, request: Any) -> None:
        if request.status == RequestStatus.RUNNING:
            self._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.waiting.remove_request(request)
        elif request.request_id in self._arrived:
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            self._arrived.discard(request.request_id)


class MovingHistoryScheduler(MovingScheduler, HistoryScheduler):
    """With drafts from history."""

    CALLABLE = (*HistoryScheduler.CALLABLE, *OF_MOVES)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Unless it looks draft lengths up, vLLM pads what joins a decode batch with one token to the longest draft, for
        # its CUDA graphs: an arrival's first step would verify tokens that nobody proposed.
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def window_of(self, request_id: str) -> int | None:
        return self.drafter.window(request_id)


class MovingMeteredScheduler(MovingScheduler, MeteredScheduler):
    """Without speculation."""

    CALLABLE = (*MeteredScheduler.CALLABLE, *OF_MOVES)
