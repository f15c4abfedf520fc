"""KV blocks through a buffer: every tensor-parallel size to every other, and what goes wrong with files."""

from __future__ import annotations

import inspect
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rhyme_openrlhf.engine.kv_copies import export_blocks, import_blocks
from rhyme_openrlhf.kv import device_rows
from rhyme_openrlhf.kv.buffer import PREFIX, KvBuffer, KvBufferStore, KvLayout
from rhyme_openrlhf.kv.device_rows import DeviceRows, import_pieces
from rhyme_openrlhf.kv.heads import head_share
from rhyme_openrlhf.shared_files import remove_stale

LAYERS, HEADS, BLOCK, WIDTH = 3, 4, 8, 6
ALL = head_share(0, 1, HEADS)
LAYOUT = KvLayout(LAYERS, HEADS, BLOCK, WIDTH, "bfloat16")


def caches(full: torch.Tensor, ranks: int) -> list[list[torch.Tensor]]:
    """Each rank's layers of a cache [layers, blocks, heads, block size, width]."""
    shares = [head_share(rank, ranks, HEADS) for rank in range(ranks)]
    return [[layer[:, share.first : share.end].clone() for layer in full] for share in shares]


def whole(ranks: list[list[torch.Tensor]]) -> torch.Tensor:
    """The cache that ranks hold together."""
    writers = [r for r in range(len(ranks)) if head_share(r, len(ranks), HEADS).writes]
    return torch.stack([torch.cat([ranks[r][layer] for r in writers], dim=1) for layer in range(LAYERS)])


@pytest.mark.parametrize("source", [1, 2, 4, 8])
@pytest.mark.parametrize("destination", [1, 2, 4, 8])
@pytest.mark.parametrize("on_device", [False, True])
def test_blocks_arrive_whole_whatever_the_ranks(tmp_path: Path, source: int, destination: int, on_device: bool) -> None:
    """In two stages, into blocks of other numbers; every other block stays as it was."""
    torch.manual_seed(0)
    here = torch.randn(LAYERS, 10, HEADS, BLOCK, WIDTH).to(torch.bfloat16)
    there = torch.randn(LAYERS, 10, HEADS, BLOCK, WIDTH).to(torch.bfloat16)
    store = KvBufferStore(tmp_path)
    buffer = KvBuffer.from_plain(store.make(LAYOUT, 6, on_device).to_plain())
    kept = [DeviceRows() for _ in range(source)]
    senders, receivers = caches(here, source), caches(there, destination)
    for blocks, into, first in (([7, 2, 5], [1, 9, 4], 0), ([0], [6], 3)):
        for rank, cache in enumerate(senders):
            export = kept[rank].export if on_device else export_blocks
            export(cache, blocks, buffer, first, head_share(rank, source, HEADS))
        for rank, cache in enumerate(receivers):
            bring_in = import_pieces if on_device else import_blocks
            bring_in(cache, into, buffer, first, head_share(rank, destination, HEADS))
    store.remove(buffer)
    store.remove(buffer)
    expected = there.clone()
    expected[:, [1, 9, 4, 6]] = here[:, [7, 2, 5, 0]]
    assert torch.equal(whole(receivers), expected)
    # Ranks that hold the same head hold the same.
    for rank, cache in enumerate(receivers):
        share = head_share(rank, destination, HEADS)
        assert torch.equal(torch.stack(cache), expected[:, :, share.first : share.end])
    assert not list(tmp_path.iterdir())


def test_heads_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(ValueError, match="4 KV heads cannot be shared by 3 ranks"):
        head_share(0, 3, 4)


def test_a_buffer_that_is_gone_or_torn_is_an_error(tmp_path: Path) -> None:
    store = KvBufferStore(tmp_path)
    buffer = store.make(LAYOUT, 2)
    os.truncate(buffer.path, 10)
    cache = caches(torch.zeros(LAYERS, 3, HEADS, BLOCK, WIDTH, dtype=torch.bfloat16), 1)[0]
    with pytest.raises(OSError, match="is not of"):
        import_blocks(cache, [0], buffer, 0, ALL)
    store.remove(buffer)
    with pytest.raises(FileNotFoundError):
        export_blocks(cache, [0], buffer, 0, ALL)


def test_pieces_on_devices_are_there_whole_or_an_error(tmp_path: Path) -> None:
    store, rows = KvBufferStore(tmp_path), DeviceRows()
    buffer, other = store.make(LAYOUT, 2, on_device=True), store.make(LAYOUT, 2, on_device=True)
    cache = caches(torch.ones(LAYERS, 3, HEADS, BLOCK, WIDTH, dtype=torch.bfloat16), 1)[0]
    halves = [[layer[:, :2] for layer in cache], [layer[:, 2:] for layer in cache]]
    with pytest.raises(OSError, match=r"heads \[0, 1, 2, 3\] of the blocks from 0 on"):
        import_pieces(cache, [0], buffer, 0, ALL)
    rows.export(halves[0], [0], buffer, 0, head_share(0, 2, HEADS))
    with pytest.raises(OSError, match=r"heads \[2, 3\] of the blocks from 0 on"):
        import_pieces(cache, [0], buffer, 0, ALL)
    rows.export(halves[1], [0], other, 0, head_share(1, 2, HEADS))
    assert rows.kept == {buffer.path, other.path}
    store.remove(buffer)
    # No buffer of this name any more: nothing is left in its place, and its memory is given back.
    with pytest.raises(FileNotFoundError):
        rows.export(cache, [0], buffer, 0, ALL)
    assert rows.kept == {other.path}
    rows.drop(other.path)
    rows.drop(other.path)
    store.remove(other)
    assert not rows.kept and not list(tmp_path.iterdir())


def test_a_piece_that_nobody_opened_is_given_back(tmp_path: Path) -> None:
    """Without a GPU: nothing of it is left in shared memory."""
    before = set(os.listdir("/dev/shm"))
    store, rows = KvBufferStore(tmp_path), DeviceRows()
    buffer = store.make(LAYOUT, 2, on_device=True)
    cache = caches(torch.ones(LAYERS, 3, HEADS, BLOCK, WIDTH, dtype=torch.bfloat16), 1)[0]
    rows.export(cache, [0], buffer, 0, ALL)
    store.remove(buffer)
    rows.drop(buffer.path)
    ours = f"torch_{os.getpid()}_"
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith(ours)}
    assert not list(tmp_path.iterdir())


class PieceOnAGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_on_a_gpu_torch_holds_no_memory_for_an_opener_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own arguments for a tensor of a device, by its own function; only the device's calls are stand-ins."""
    released: list[tuple[bytes, int]] = []
    shared = (0, b"allocation", 64, 0, b"count", 7, b"event", True)
    storage = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(
        device_rows.torch.UntypedStorage,
        "_release_ipc_counter_cuda",
        classmethod(lambda cls, handle, offset: released.append((handle, offset))),
    )
    monkeypatch.setattr(
        PieceOnAGpu,
        "_typed_storage",
        lambda self: SimpleNamespace(_untyped_storage=storage, _share_cuda_=lambda: shared),
    )
    monkeypatch.setattr(device_rows.reductions, "StorageWeakRef", lambda storage: None)
    piece = torch.zeros(16).as_subclass(PieceOnAGpu)
    arguments = pickle.loads(device_rows._handle(piece, "not-written"))
    assert released == [(b"count", 7)]
    names = list(inspect.signature(device_rows.reductions.rebuild_cuda_tensor).parameters)
    opened = dict(zip(names, arguments, strict=True))
    assert (opened["ref_counter_handle"], opened["ref_counter_offset"]) == (b"count", 7)


def test_buffers_of_a_dead_process_are_removed_and_no_others(tmp_path: Path) -> None:
    mine = KvBufferStore(tmp_path).make(LAYOUT, 1)
    # No process has this start time.
    (tmp_path / f"{PREFIX}-{os.getpid()}-1-abc").touch()
    (tmp_path / "rhyme-weights-1-1-1").touch()
    assert remove_stale(PREFIX, tmp_path) == [f"{PREFIX}-{os.getpid()}-1-abc"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([Path(mine.path).name, "rhyme-weights-1-1-1"])
