"""A segment's file: read while it is written, never a mixture of two versions, pinned once where CUDA is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rhyme_openrlhf.weights import segment_file
from rhyme_openrlhf.weights.buckets import Parameter, Segment, Span, lay_out, plan_buckets
from rhyme_openrlhf.weights.node import SegmentStore
from rhyme_openrlhf.weights.segment_file import SegmentFile, SegmentFiles, SegmentGoneError, tensors

PARAMETERS = [Parameter(f"p{i}", (8,), "float32", 32) for i in range(4)]
BUCKETS = plan_buckets(PARAMETERS, 128, 1)
SECONDS = 30


def write(segment: Segment, span: Span, value: float) -> None:
    file = SegmentFile(segment.path)
    file.data[span.start : span.stop].view(np.float32)[:] = value
    file.mark(span.first, span.end, segment.version)
    file.close()


def spans() -> tuple[Span, ...]:
    found = lay_out(BUCKETS)[1]
    assert [span.end - span.first for span in found] == [2, 2]
    return found


def test_a_bucket_is_read_while_the_next_one_is_still_written(tmp_path: Path) -> None:
    segment = SegmentStore(BUCKETS, tmp_path).begin(3)
    first, second = spans()
    write(segment, first, 3.5)
    reading = tensors(SegmentFiles().open(segment), segment.version)
    for name in ("p0", "p1"):
        found, tensor = next(reading)
        assert found == name and torch.equal(tensor, torch.full((8,), 3.5))
    taken = threading.Event()

    def take() -> tuple[str, Any]:
        taken.set()
        return next(reading)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(take)
        assert taken.wait(SECONDS)
        assert not waiting.done(), "nothing was written there yet"
        write(segment, second, 4.5)
        found, tensor = waiting.result(SECONDS)
    assert found == "p2" and torch.equal(tensor, torch.full((8,), 4.5))
    assert next(reading)[0] == "p3" and next(reading, None) is None


def test_a_version_that_is_overwritten_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    store = SegmentStore(BUCKETS, tmp_path)
    segment = store.begin(0)
    for span in spans():
        write(segment, span, 0.0)
    files = SegmentFiles()
    file = files.open(segment)
    file.check(0)
    store.begin(1)
    file.check(0)
    # The third takes the oldest one's file.
    third = store.begin(2)
    assert files.open(third) is file
    with pytest.raises(SegmentGoneError, match="weight version 0 was overwritten"):
        file.check(0)
    write(third, spans()[0], 2.0)
    with pytest.raises(SegmentGoneError, match="weight version 0 was overwritten by version 2"):
        file.wait_for(0, 0, 4)
    with pytest.raises(SegmentGoneError, match="weight version 2 was overwritten"):
        file.check(2)


def test_who_waits_for_a_version_that_is_removed_is_told(tmp_path: Path) -> None:
    store = SegmentStore(BUCKETS, tmp_path)
    segment = store.begin(5)
    file = SegmentFiles().open(segment)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(file.wait_for, 5, 0, 4)
        store.close()
        with pytest.raises(SegmentGoneError, match="weight version 5 was removed"):
            waiting.result(SECONDS)


def test_memory_is_pinned_once_and_used_for_every_other_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: dict[int, int] = {}
    calls: list[str] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        calls.append("pin")
        pinned[address] = nbytes
        return 0

    def unregister(address: int) -> int:
        calls.append("unpin")
        del pinned[address]
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(segment_file, "gpu_present", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    store, files = SegmentStore(BUCKETS, tmp_path), SegmentFiles()
    for number in range(6):
        files.open(store.begin(number))
    assert calls == ["pin", "pin"] and list(pinned.values()) == [sum(bucket.nbytes for bucket in BUCKETS)] * 2
    store.close()
    files.open(store.begin(6))
    assert calls == ["pin", "pin", "unpin", "unpin", "pin"]
