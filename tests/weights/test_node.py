"""Weight versions as shared-memory files of a node."""

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from rhyme_openrlhf.shared_files import OwnedFiles
from rhyme_openrlhf.weights import node
from rhyme_openrlhf.weights.buckets import Bucket, Parameter, Segment, plan_buckets
from rhyme_openrlhf.weights.node import KEPT, SegmentStore, WeightSpaceError
from rhyme_openrlhf.weights.segment_file import SegmentFile, SegmentFiles
from rhyme_openrlhf.weights.segment_file import tensors as mapped_tensors


def version(number: int, bucket_bytes: int = 256) -> tuple[list[Bucket], list[np.ndarray], dict[str, torch.Tensor]]:
    """A weight version of three tensors: several buckets, their contents, and the tensors."""
    tensors = {
        "embed": torch.arange(60, dtype=torch.float32).reshape(6, 10) + number,
        "norm": torch.full((3,), float(number), dtype=torch.bfloat16),
        "head": torch.full((7, 5), number * 2.0, dtype=torch.float16),
    }
    parameters = [
        Parameter(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.numel() * t.element_size())
        for name, t in tensors.items()
    ]
    buckets, arrays = [], []
    for bucket in plan_buckets(parameters, bucket_bytes, 2):
        array = np.zeros(bucket.nbytes, dtype=np.uint8)
        for entry in bucket.entries:
            raw = tensors[entry.parameter.name].contiguous().view(-1).view(torch.uint8).numpy()
            array[entry.offset : entry.offset + raw.size] = raw
        buckets.append(bucket)
        arrays.append(array)
    return buckets, arrays, tensors


def test_what_is_stored_is_what_a_worker_maps(tmp_path: Path) -> None:
    buckets, arrays, tensors = version(3)
    assert len(buckets) > 1
    segment = SegmentStore(buckets, tmp_path).store(3, arrays)
    received = Segment.from_plain(segment.to_plain())
    file = SegmentFiles().open(received)
    mapped = dict(mapped_tensors(file, received.version))
    assert [entry.parameter for entry in file.entries] == [one.parameter for b in buckets for one in b.entries]
    assert mapped.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert mapped[name].dtype == tensor.dtype
        assert torch.equal(mapped[name], tensor)


def test_only_the_newest_versions_are_kept(tmp_path: Path) -> None:
    store = SegmentStore(version(0)[0], tmp_path)
    for number in range(5):
        store.store(number, version(number)[1])
    assert len(list(tmp_path.iterdir())) == KEPT
    assert {int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir()} == {3, 4}
    # Of one that has begun in the file of an older one, nothing is there yet.
    begun = store.begin(5)
    with closing(SegmentFile(begun.path)) as file:
        assert set(file.versions()) == {-1}
    store.close()
    assert not list(tmp_path.iterdir())


def test_segments_of_dead_processes_are_removed_and_others_kept(tmp_path: Path) -> None:
    living = Path(OwnedFiles(node.PREFIX, tmp_path).make("1")).name
    foreign = "somebody-elses-file"
    for name in (f"{node.PREFIX}-{os.getpid()}-abc-1", f"{node.PREFIX}-{2**22 - 1}-abc-7.partial", foreign):
        (tmp_path / name).touch()
    SegmentStore((), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {living, foreign}


def test_too_little_shared_memory_is_said_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, arrays, _ = version(1)
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 0, 0, 0, 255))
    monkeypatch.setattr(node.os, "statvfs", lambda _: full)
    with pytest.raises(WeightSpaceError, match=r"has 0 MB free, but a weight version needs 1 MB.*--shm-size"):
        SegmentStore(buckets, tmp_path).store(1, arrays)
    assert not list(tmp_path.iterdir())
