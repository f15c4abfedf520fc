"""KV blocks through pinned memory: the GPU's way on CPU tensors, whose copies are done when they are waited for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rhyme_openrlhf.engine import kv_copies
from rhyme_openrlhf.engine.kv_copies import export_blocks, import_blocks
from rhyme_openrlhf.kv import pinned_copies
from rhyme_openrlhf.kv.buffer import KvBufferStore, KvLayout, head_share
from rhyme_openrlhf.kv.pinned_copies import PinnedCopies

LAYERS, HEADS, BLOCK, WIDTH = 3, 2, 4, 6
LAYOUT = KvLayout(LAYERS, HEADS, BLOCK, WIDTH, "float32")
ALL = head_share(0, 1, HEADS)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Calls to the device, which is pretended on this machine's memory; pieces are two blocks long."""
    done: list[str] = []

    def stream() -> Any:
        return SimpleNamespace(wait_stream=lambda other: done.append("after the step"))

    @contextmanager
    def on_stream(of: Any) -> Iterator[None]:
        yield

    def event() -> Any:
        number = sum(entry.startswith("copy") for entry in done)
        return SimpleNamespace(
            record=lambda of: done.append(f"copy {number}"), synchronize=lambda: done.append(f"wait {number}")
        )

    def pinned(nbytes: int) -> torch.Tensor:
        done.append("pin")
        return torch.empty(nbytes, dtype=torch.uint8)

    for name, stands in (("Stream", stream), ("stream", on_stream), ("Event", event), ("current_stream", lambda: None)):
        monkeypatch.setattr(torch.cuda, name, stands)
    monkeypatch.setattr(pinned_copies, "pinned", pinned)
    monkeypatch.setattr(pinned_copies, "PIECE_BYTES", 2 * LAYERS * LAYOUT.block_bytes)
    monkeypatch.setattr(kv_copies, "gpu_present", lambda: True)
    copies = PinnedCopies()
    monkeypatch.setattr(kv_copies, "pinned_copies", lambda: copies)
    yield done


def test_blocks_go_out_and_in_as_without_a_gpu(tmp_path: Path, log: list[str]) -> None:
    torch.manual_seed(0)
    here = [torch.randn(12, HEADS, BLOCK, WIDTH) for _ in range(LAYERS)]
    there = [torch.randn(12, HEADS, BLOCK, WIDTH) for _ in range(LAYERS)]
    expected = [layer.clone() for layer in there]
    buffer = KvBufferStore(tmp_path).make(LAYOUT, 6)
    out, into = [7, 2, 11, 5, 3], [1, 9, 4, 0, 10]
    export_blocks(here, out, buffer, 1, ALL)
    import_blocks(there, into, buffer, 1, ALL)
    for layer in range(LAYERS):
        expected[layer][into] = here[layer][out]
        assert torch.equal(there[layer], expected[layer])


def test_one_copy_moves_all_layers_and_the_host_works_beside_it(tmp_path: Path, log: list[str]) -> None:
    caches = [torch.zeros(12, HEADS, BLOCK, WIDTH) for _ in range(LAYERS)]
    buffer = KvBufferStore(tmp_path).make(LAYOUT, 6)
    export_blocks(caches, [0, 1, 2, 3, 4, 5], buffer, 0, ALL)
    # While the host empties one buffer, the device fills the other one.
    assert log == ["after the step", "pin", "copy 0", "pin", "copy 1", "wait 0", "copy 2", "wait 1", "wait 2"]
    log.clear()
    import_blocks(caches, [0, 1, 2, 3, 4, 5], buffer, 0, ALL)
    # Memory is pinned once. The third piece takes the first one's buffer.
    assert log == ["after the step", "copy 0", "copy 1", "wait 0", "copy 2", "wait 2", "wait 1"]
