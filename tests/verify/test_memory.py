"""Room for what a run keeps: judged, and read from the machine's own files."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("vllm")

from rhyme_openrlhf.verify.memory import LEAST_HOST_BYTES, Room, host_free, judge

GIB = 1024**3
ROOM = Room(
    host_free=100 * GIB, shm_free=60 * GIB, shm_needed=31 * GIB, object_store=40 * GIB, nodes=2,
    weight_version=15 * GIB, indexes=GIB,
)  # fmt: skip


def test_enough_is_ok() -> None:
    assert judge(ROOM, "buffer") == ("ok", "")


def test_shared_memory_that_does_not_hold_the_weight_versions_fails_and_says_what_to_do() -> None:
    result, why = judge(dataclasses.replace(ROOM, shm_free=16 * GIB), "buffer")
    assert result == "failed" and "16,384 MiB free" in why and "--shm-size" in why
    # OpenRLHF's own transport does not use it.
    assert judge(dataclasses.replace(ROOM, shm_free=0), "openrlhf")[0] == "ok"


def test_an_object_store_that_does_not_hold_one_version_fails() -> None:
    result, why = judge(dataclasses.replace(ROOM, object_store=GIB), "buffer")
    assert result == "failed" and "--object-store-memory" in why
    # On one node nothing goes through it.
    assert judge(dataclasses.replace(ROOM, object_store=GIB, nodes=1), "buffer") == ("ok", "")


def test_little_host_memory_is_said() -> None:
    result, why = judge(dataclasses.replace(ROOM, host_free=LEAST_HOST_BYTES - 1), "buffer")
    assert result == "informative" and "host memory" in why


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       100 kB\nMemAvailable:       64 kB\nHugePages_Total:       0\n")
    assert host_free(meminfo, tmp_path / "none") == 64 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert host_free(meminfo, tmp_path) == 64 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert host_free(meminfo, tmp_path) == 4000
