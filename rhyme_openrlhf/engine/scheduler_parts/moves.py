"""vLLM scheduler plug-in: what a move needs of a scheduler. Mixed into the run's own schedulers (engine/scheduler.py).

At the source a sample can be stopped and kept: it is in no queue, so it is not scheduled, but it is a request like any
other with its KV blocks. What the destination needs is the base (arrivals.py).

Invariants: every order may be given twice; a sample that was stopped while it ran keeps one seat free
(`engine/patches/queues.py`), so that there is always one to go on with; no KV block survives a reset of the prefix
cache (a weight load): stopped samples recompute then.
Checked against vLLM 0.29.0 and 0.32.0 `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from rhyme_openrlhf.drafting.drafter import Attribution, Verified
from rhyme_openrlhf.engine.patches import queues
from rhyme_openrlhf.engine.request_keys import UNCOUNTED
from rhyme_openrlhf.engine.scheduler import HistoryScheduler, MeteredScheduler, extra_arguments
from rhyme_openrlhf.engine.scheduler_parts.arrivals import ArrivingScheduler
from rhyme_openrlhf.kv.buffer import KvBuffer, write_handover
from rhyme_openrlhf.kv.handover import Handover

OF_MOVES = (
    "can_carry_kv", "hold_room", "release_room", "room_blocks", "import_rows", "export_full", "stop_sample",
    "resume_sample", "rooms", "seats", "take_first_token", "status", "expects", "gone_on",
)  # fmt: skip


class MovingScheduler(ArrivingScheduler):
    """Stopping, keeping, resuming; what is told of the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Stopped requests, and whether each keeps a seat: one that had none yet must not take another's.
        self._stopped: dict[str, bool] = {}

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
            "free_seats": max(queues.seats(self) - len(self.running), 0),
            "step_tokens": self.max_num_scheduled_tokens,
            **self._reports.take(self.meter.counters()),
        }

    def on_verified(self, drafts: Verified) -> Attribution:
        """As its base, and counted for the samples."""
        for request_id, accepted in zip(drafts.requests, drafts.accepted, strict=True):
            self._reports.accepted(request_id, accepted)
        return super().on_verified(drafts)

    # --- source

    def can_carry_kv(self) -> bool:
        """Whether KV blocks of this model can go elsewhere: one kind of attention, over the whole context."""
        groups = self.kv_cache_config.kv_cache_groups
        return len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec

    def export_full(self, request_id: str, buffer: dict[str, Any]) -> tuple[int, str] | None:
        """Copy the blocks of a request that change no more to the first rows of a buffer, while it goes on.

        How many, and "" or why not; None if there is no such unfinished request.
        """
        request = self.requests.get(request_id)
        if request is None or request.is_finished():
            return None
        blocks = self._blocks(request)[: self._final_tokens(request) // self.block_size]
        return len(blocks), self._export(blocks, buffer, 0)

    def _export(self, blocks: list[int], buffer: dict[str, Any], first: int) -> str:
        answers = self.call_workers("rhyme_export_kv", args=(blocks, buffer, first)) if blocks else []
        return next((answer for answer in answers if answer), "")

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
            seated = queues.take_out(self, request)
            self._stopped[request_id] = seated
            queues.hold_seats(self, seated)
        at, computed = time.time(), self._final_tokens(request)
        blocks = self._blocks(request)[: -(-computed // self.block_size)]
        window, generator = self.window_of(request_id), None
        if request.sampling_params.seed is not None:
            generator = self.call_workers("rhyme_generator_state", args=(request_id,))[0]
        problem = self._export(blocks[first:], buffer, first) if buffer else ""
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
            queues.put_back(self, request)
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
        queues.hold_seats(self, -self._stopped.pop(request_id, False))

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._forget_stop(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """As its base, and stopped samples are computed again."""
        if reset_running_requests:
            for request_id in list(self._stopped):
                self._recompute(self.requests[request_id])
        return super().reset_prefix_cache(reset_running_requests, reset_connector)


class MovingHistoryScheduler(MovingScheduler, HistoryScheduler):
    """With drafts from history."""

    CALLABLE = (*HistoryScheduler.CALLABLE, *OF_MOVES)

    def window_of(self, request_id: str) -> int | None:
        return self.drafter.window(request_id)


class MovingMeteredScheduler(MovingScheduler, MeteredScheduler):
    """Without speculation."""

    CALLABLE = (*MeteredScheduler.CALLABLE, *OF_MOVES)
