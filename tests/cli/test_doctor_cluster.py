"""`rhyme doctor --cluster`: what is judged of each node's report, and two real nodes that say it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.cli import demo, doctor, upstream
from rhyme_openrlhf.cli.cluster_checks import Wanted, is_ready, judge
from rhyme_openrlhf.cli.doctor_checks import BROKEN, LOW, MISSING, OK, SMALL, WRONG
from rhyme_openrlhf.cli.doctor_cluster import wanted_of
from rhyme_openrlhf.cli.node_report import NodeReport, PathFacts, report
from rhyme_openrlhf.platform.cluster import Node, Reply

GIB = 2**30
THERE, LOCKED, ELSEWHERE = (
    PathFacts(True, True, (7, 11)),
    PathFacts(True, False, (7, 11)),
    PathFacts(True, True, (8, 11)),
)
WANTED = Wanted(16 * GIB, {"/m": "--actor.model_name_or_path"}, {"/c": "--ckpt.path"}, "http://plane:8420")
GOOD = NodeReport(
    {"python": "3.11.9", "torch": "2.13.0"}, 64 * GIB, 60 * GIB, 1000.0, {"lo": ("127.0.0.1",), "ib0": ("10.0.0.7",)},
    frozenset({"HF_TOKEN"}), {"/m": THERE, "/c": THERE}, "", ("H200",),
)  # fmt: skip
HERE = Node("aa", "10.0.0.1", 8, 8 * GIB, True)
OTHER = Node("bb", "10.0.0.7", 8, 8 * GIB, False)
VARIABLES = {"HF_TOKEN": "secret", "NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "ib0"}


def replied(node: Node, found: NodeReport, problem: str = "") -> Reply:
    mine = {**found.interfaces, "ib0": ("10.0.0.1",)} if node.here else found.interfaces
    return Reply(node, dataclasses.replace(found, interfaces=mine), problem, 999.0, 1001.0)


def of_other(changes: dict[str, object], variables: dict[str, str] = VARIABLES) -> list[tuple[str, str, str]]:
    """Component, state and mend of each line of the other node."""
    found = judge([replied(HERE, GOOD), replied(OTHER, dataclasses.replace(GOOD, **changes))], WANTED, variables)  # type: ignore[arg-type]
    assert [one.check.state for one in found if one.node == "10.0.0.1"] == [OK]
    return [(one.check.component, one.check.state, one.check.mend) for one in found if one.node == "10.0.0.7"]


def test_a_node_with_everything_has_one_line() -> None:
    found = judge([replied(HERE, GOOD), replied(OTHER, GOOD)], WANTED, VARIABLES)
    assert [(one.node, one.check.component, one.check.state) for one in found] == [
        ("10.0.0.1", "all", OK),
        ("10.0.0.7", "all", OK),
    ]
    assert found[1].check.found == "8 GPUs (H200), ib0, 60.0 GiB of /dev/shm free" and is_ready(found)


@pytest.mark.parametrize(
    ("changes", "component", "state", "mend"),
    [
        ({"versions": {"python": "3.11.9", "torch": "2.12.0"}}, "torch", WRONG, "pip install torch==2.13.0"),
        ({"versions": {"python": "3.11.9"}}, "torch", MISSING, "pip install torch==2.13.0"),
        ({"versions": {"python": "3.12.1", "torch": "2.13.0"}}, "python", WRONG, "install Python 3.11.9"),
        ({"broken": "the driver is too old"}, "GPUs", BROKEN, "see what was found"),
        ({"shm": 16 * GIB}, "/dev/shm", SMALL, "mount -o remount,size=17G /dev/shm"),
        ({"shm": 20 * GIB}, "/dev/shm", LOW, f"ray start --object-store-memory={4 * GIB} ..."),
        ({"shm_free": 2 * GIB}, "/dev/shm", LOW, "rm what dead programs left"),
        ({"clock": 300.0}, "clock", LOW, "timedatectl set-ntp true"),
        ({"clock": 1700.0}, "clock", LOW, "timedatectl set-ntp true"),
        ({"variables": frozenset()}, "HF_TOKEN", LOW, "HF_TOKEN=... ray start"),
        ({"paths": {"/m": PathFacts(False, True, (1, 1)), "/c": THERE}}, "--actor.model_name_or_path", MISSING, "copy"),
        ({"paths": {"/m": THERE, "/c": ELSEWHERE}}, "--ckpt.path", BROKEN, "name a path on a"),
        ({"paths": {"/m": THERE, "/c": LOCKED}}, "--ckpt.path", BROKEN, "chown /c on that node"),
        # The run reports from here.
        ({"unreachable": "Connection refused"}, "control plane", LOW, "curl http://plane:8420/healthz"),
    ],
)  # fmt: skip
def test_what_a_node_lacks_has_a_line_with_the_command(
    changes: dict[str, object], component: str, state: str, mend: str
) -> None:
    ((found, is_in, command),) = of_other(changes)
    assert (found, is_in) == (component, state) and command.startswith(mend)


def test_interfaces_are_those_that_nccl_and_gloo_would_find() -> None:
    changes = {"interfaces": {"lo": (), "eth0": ("10.0.0.7",)}}
    assert [(one, state) for one, state, _ in of_other(changes)] == [
        ("NCCL_SOCKET_IFNAME", MISSING), ("GLOO_SOCKET_IFNAME", MISSING)
    ]  # fmt: skip
    for chosen in ("et,ib", "=ib0,eth0", "^docker"):
        assert of_other({}, {"HF_TOKEN": "x", "NCCL_SOCKET_IFNAME": chosen})[0][0] == "all", chosen
    # An address that Ray was given and no interface has.
    ((component, state, _),) = of_other({"interfaces": {"ib0": ("10.0.0.8",)}})
    assert (component, state) == ("network", BROKEN)


def test_a_node_without_an_answer_and_a_control_plane_out_of_reach_stop_a_run() -> None:
    silent = Reply(OTHER, None, "is rhyme-openrlhf there? No module named 'rhyme_openrlhf'", 999.0, 1001.0)
    found = judge([replied(HERE, GOOD), silent], WANTED, VARIABLES)
    assert found[1].check.state == MISSING and not is_ready(found)
    found = judge([replied(HERE, dataclasses.replace(GOOD, unreachable="timed out"))], WANTED, VARIABLES)
    assert [(one.check.component, one.check.state) for one in found] == [("control plane", MISSING)]
    assert not is_ready(found)


def test_a_report_is_of_this_machine(tmp_path: Path) -> None:
    found = report([str(tmp_path), str(tmp_path / "new" / "one"), "/nowhere"], "http://127.0.0.1:9", False)
    assert found.paths[str(tmp_path)].exists and found.paths[str(tmp_path)].writable
    new = found.paths[str(tmp_path / "new" / "one")]
    assert not new.exists and new.identity == found.paths[str(tmp_path)].identity
    assert found.unreachable and "127.0.0.1" in found.interfaces["lo"] and found.shm >= found.shm_free > 0
    assert found.versions["python"].startswith("3.")


def test_a_folder_that_may_not_be_looked_into_and_a_port_without_http_are_findings(
    monkeypatch: pytest.MonkeyPatch, starts_listener: None
) -> None:
    def refused(path: str | Path, *_: Any, **__: Any) -> os.stat_result:
        if str(path).startswith("/locked/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    real = os.stat
    with socket.create_server(("127.0.0.1", 0)) as server, monkeypatch.context() as patch:
        patch.setattr(os, "stat", refused)
        port = server.getsockname()[1]
        answering = threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"))
        answering.start()
        found = report(["/locked/data.jsonl"], f"http://127.0.0.1:{port}", False)
        answering.join()
    assert not found.paths["/locked/data.jsonl"].exists and found.unreachable


def test_a_shared_store_of_histories_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("openrlhf")
    args = upstream.parse([*demo.arguments(str(tmp_path / "run")), "--history.store", str(tmp_path)])
    assert wanted_of(args).shared[str(tmp_path)] == "--history.store"


def test_without_an_address_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.main(["--cluster"]) == 2
    assert "RAY_ADDRESS=<head>:6379 rhyme doctor --cluster" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert doctor.main(["--cluster"]) == 2
    said = capsys.readouterr().err
    assert "no Ray answers at RAY_ADDRESS 127.0.0.1:9 (Connection refused)" in said and said.count("\n") == 1


HIDDEN = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "rhyme_openrlhf":
            raise ModuleNotFoundError("No module named 'rhyme_openrlhf'")
sys.meta_path.insert(0, Hidden())
"""


def test_two_nodes_are_asked_and_the_one_without_the_package_is_named(
    starts_ray: None, starts_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("openrlhf")
    from ray.cluster_utils import Cluster

    # The driver's own folders are searched first, so the package has to be hidden.
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    head = {"num_cpus": 1, "include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        without = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
        cluster.add_node(num_cpus=1, env_vars=without)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        assert doctor.main(["--cluster", "--json"]) == 1
        lines = json.loads(capsys.readouterr().out)
        assert [line["component"] for line in lines] == ["all", "rhyme-openrlhf"]
        assert "No module named 'rhyme_openrlhf'" in lines[1]["found"]
    finally:
        cluster.shutdown()
