"""KV blocks through a buffer: every tensor-parallel size to every other, and what goes wrong with files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rhyme_openrlhf.engine.kv_copies import export_blocks, import_blocks
from rhyme_openrlhf.kv.buffer import PREFIX, KvBuffer, KvBufferStore, KvLayout, head_share
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
def test_blocks_arrive_whole_whatever_the_ranks(tmp_path: Path, source: int, destination: int) -> None:
    """In two stages, into blocks of other numbers; every other block stays as it was."""
    torch.manual_seed(0)
    here = torch.randn(LAYERS, 10, HEADS, BLOCK, WIDTH).to(torch.bfloat16)
    there = torch.randn(LAYERS, 10, HEADS, BLOCK, WIDTH).to(torch.bfloat16)
    store = KvBufferStore(tmp_path)
    buffer = KvBuffer.from_plain(store.make(LAYOUT, 6).to_plain())
    senders, receivers = caches(here, source), caches(there, destination)
    for blocks, into, first in (([7, 2, 5], [1, 9, 4], 0), ([0], [6], 3)):
        for rank, cache in enumerate(senders):
            export_blocks(cache, blocks, buffer, first, head_share(rank, source, HEADS))
        for rank, cache in enumerate(receivers):
            import_blocks(cache, into, buffer, first, head_share(rank, destination, HEADS))
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


def test_buffers_of_a_dead_process_are_removed_and_no_others(tmp_path: Path) -> None:
    mine = KvBufferStore(tmp_path).make(LAYOUT, 1)
    (tmp_path / f"{PREFIX}-{os.getpid()}-1-abc").touch()
    (tmp_path / "rhyme-weights-1-1-1").touch()
    assert remove_stale(PREFIX, tmp_path) == [f"{PREFIX}-{os.getpid()}-1-abc"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([Path(mine.path).name, "rhyme-weights-1-1-1"])
