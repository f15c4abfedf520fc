"""The search for a CPU quota, on made-up machines and on this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rhyme_openrlhf.platform.cpu_share import NAME, QuotaParent, quota_parent, remove_empty


def machine(tmp_path: Path, own: str, directories: dict[str, str | None]) -> QuotaParent | str:
    (tmp_path / "own").write_text(own)
    for name, control in directories.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        if control is not None:
            (tmp_path / name / "cgroup.subtree_control").write_text(control)
    return quota_parent(tmp_path, tmp_path / "own")


@pytest.mark.parametrize("mounted", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path: Path, mounted: str) -> None:
    own = f"4:memory:/job\n3:{mounted}:/job\n1:name=systemd:/\n0::/\n"
    assert machine(tmp_path, own, {f"{mounted}/job": None}) == QuotaParent(tmp_path / mounted / "job", 1)


def test_version_1_under_its_short_name(tmp_path: Path) -> None:
    assert machine(tmp_path, "3:cpu,cpuacct:/\n", {"cpu": None}) == QuotaParent(tmp_path / "cpu", 1)


def test_version_2(tmp_path: Path) -> None:
    found = machine(tmp_path, "0::/user/job\n", {"user/job": "memory cpu\n"})
    assert found == QuotaParent(tmp_path / "user/job", 2)


def test_why_there_is_none(tmp_path: Path) -> None:
    assert (
        machine(tmp_path, "0::/job\n", {"job": "memory pids\n"})
        == f"{tmp_path}/job does not hand the cpu controller down"
    )
    assert "is not writable" in str(machine(tmp_path, "0::/elsewhere\n", {}))
    assert "is not writable" in str(machine(tmp_path, "3:cpu:/elsewhere\n", {}))
    assert machine(tmp_path, "4:memory:/job\n", {}) == "there are no cgroups"
    assert "cannot be read" in str(quota_parent(tmp_path, tmp_path / "missing"))


def test_what_ended_workers_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}1").mkdir()
    (tmp_path / f"{NAME}2").mkdir()
    (tmp_path / f"{NAME}2" / "busy").mkdir()
    (tmp_path / "another's").mkdir()
    remove_empty(QuotaParent(tmp_path, 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another's", f"{NAME}2"]


def limited(cpus: float, nice: int) -> str:
    """What a process of its own says after limiting itself, and its priority."""
    program = (
        "import os; from rhyme_openrlhf.platform.cpu_share import limit_cpus\n"
        f"print(limit_cpus({cpus}, {nice})); print(os.nice(0)); print(open('/proc/self/cgroup').read())"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout


@pytest.mark.usefixtures("starts_python")
def test_this_machine_gives_what_it_says() -> None:
    said, nice, cgroups = limited(0.5, 19).split("\n", 2)
    assert nice == "19" and said.startswith("nice 19, ")
    parent = quota_parent()
    if isinstance(parent, str):
        assert said.endswith(f"no CPU quota: {parent}")
        return
    assert ("quota of 0.5 CPUs" in said) == (NAME in cgroups) != ("no CPU quota" in said)
    remove_empty(parent)
    assert not [left for left in parent.path.glob(f"{NAME}*") if not (left / "cgroup.procs").read_text()]


@pytest.mark.usefixtures("starts_python")
def test_no_cpus_means_no_quota_and_a_priority_is_never_raised() -> None:
    before = os.nice(0)
    said, nice, _ = limited(0, 0).split("\n", 2)
    assert (said, nice) == (f"nice {before}", str(before))
