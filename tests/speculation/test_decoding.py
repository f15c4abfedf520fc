"""Which requests of a step decode, and what each is given: against loops over the same requests in Python."""

from __future__ import annotations

import enum
import gc
import sys

from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_openrlhf.config import HistoSpecSettings
from rhyme_openrlhf.speculation.drafter import HistoryDrafter


class Status(enum.IntEnum):
    """As vLLM's."""

    RUNNING = 1
    PREEMPTED = 2


class Request:
    """As much of vLLM's as is read of it."""

    def __init__(self, name: str, text: list[int]) -> None:
        self.request_id = name
        self._all_token_ids = text
        self.status = Status.RUNNING
        self.is_prefill_chunk = False
        self.spec_token_ids: list[int] = []


def begin(drafter: HistoryDrafter, number: int, prompt: str | None = "p") -> Request:
    request = Request(f"sample {number}", [1, 2, 3, 4, 1, 2])
    drafter.start(request.request_id, prompt, 1, 100, None, request)
    return request


STEPS = st.lists(
    st.tuples(
        st.permutations(range(6)),
        st.sets(st.integers(0, 5), max_size=2),
        st.sets(st.integers(0, 5), max_size=2),
        st.sets(st.integers(0, 5), max_size=2),
        st.booleans(),
    ),
    max_size=6,
)


@settings(deadline=None, derandomize=True)
@given(STEPS)
def test_those_that_decode_are_given_what_they_are_drafted(
    steps: list[tuple[list[int], set[int], set[int], set[int], bool]],
) -> None:
    """Of six requests some finish, are chunks or do not run; names may be other strings with the same letters."""
    drafter, twin = HistoryDrafter(HistoSpecSettings()), HistoryDrafter(HistoSpecSettings())
    alive: dict[int, Request] = {}
    for order, ending, chunks, waiting, copied in steps:
        for number in range(6):
            if number not in alive:
                alive[number] = begin(drafter, number)
                twin.start(f"sample {number}", "p", 1, 100)
        names = [alive[number].request_id for number in order]
        if copied:
            names = ["".join(list(name)) for name in names]
        for number in ending:
            drafter.finish(alive[number].request_id)
            twin.finish(alive.pop(number).request_id)
        for number, request in alive.items():
            request.is_prefill_chunk = number in chunks
            request.status = Status.PREEMPTED if number in waiting else Status.RUNNING
            request.spec_token_ids = []
            request._all_token_ids += [3, 4]
        decoding = [alive[n] for n in order if n in alive and n not in chunks and n not in waiting]
        assert drafter.find_decoding(names, Status.RUNNING) == len(decoding)
        expected = twin.draft([request.request_id for request in decoding], [r._all_token_ids for r in decoding])
        if decoding:
            drafter.draft_decoding(1000)
        assert [request.spec_token_ids for request in decoding] == expected
        assert all(not request.spec_token_ids for request in alive.values() if request not in decoding)


def test_a_draft_belongs_to_its_request_alone() -> None:
    drafter = HistoryDrafter(HistoSpecSettings())
    request = begin(drafter, 0)
    request._all_token_ids[:] = [1001, 1002, 1003, 1001, 1002]
    text, references = request._all_token_ids, sys.getrefcount(request)
    counts = [sys.getrefcount(token) for token in text]
    for _ in range(50):
        assert drafter.find_decoding([request.request_id], Status.RUNNING) == 1
        drafter.draft_decoding(1000)
    made = [1003, 1001]
    assert request.spec_token_ids[:2] == made
    of_draft, of_token = sys.getrefcount(request.spec_token_ids), sys.getrefcount(request.spec_token_ids[0])
    usual = [1003, 1001]
    assert (of_draft, of_token) == (sys.getrefcount(usual), sys.getrefcount(int("1009")) + 1)
    del made, usual
    assert gc.is_tracked(request.spec_token_ids)
    assert sys.getrefcount(request) == references
    assert [sys.getrefcount(token) for token in text] == counts
    drafter.finish(request.request_id)
    assert sys.getrefcount(request) < references


def test_one_that_never_drafts_is_not_found() -> None:
    drafter = HistoryDrafter(HistoSpecSettings())
    request = begin(drafter, 0, prompt=None)
    assert drafter.find_decoding([request.request_id, "unknown"], Status.RUNNING) == 0
