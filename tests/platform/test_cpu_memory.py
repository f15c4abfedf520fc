"""Memory of tensors that goes back to the machine: measured, and what is left of what was in it."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from rhyme_openrlhf.platform import gpu_present  # noqa: E402
from rhyme_openrlhf.platform.cpu_memory import release  # noqa: E402

MB = 1024**2
pytestmark = pytest.mark.skipif(gpu_present(), reason="only for machines without a GPU")


def resident() -> int:
    """Bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def test_the_memory_is_given_back_and_had_again() -> None:
    whole = torch.ones(64 * MB, dtype=torch.uint8)
    before = resident()
    # Two views of one storage: it is released once.
    released = release([whole[: 8 * MB], whole[8 * MB :]])
    assert 63 * MB < released <= 64 * MB
    assert before - resident() > 60 * MB
    assert int(whole.max()) == 0
    whole.fill_(3)
    assert int(whole.min()) == 3 and resident() > before - 4 * MB


def test_what_is_less_than_a_page_is_emptied() -> None:
    small, beside = torch.ones(100, dtype=torch.uint8), torch.ones(100, dtype=torch.uint8)
    assert release([small]) == 0
    assert int(small.max()) == 0 and int(beside.min()) == 1
