"""Marks follow from what a test starts, nothing is started without its mark, and files come into the right queue."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.side_by_side import queue_of, queues, scope, unmixed
from tests.starts import ENGINE_CORE, PROCESSES, RHYME, marks_of

REFUSED = pytest.fail.Exception


def test_a_mark_follows_from_a_fixture_and_from_the_store_that_a_parameter_names() -> None:
    assert marks_of(("tmp_path", "pair", "starts_engine"), ()) == {"engine"}
    assert marks_of(("starts_engine", "starts_ray"), (3, None)) == {"engine", "ray"}
    assert marks_of(("database",), ("postgresql",)) == {"postgresql"}
    assert marks_of(("database",), ("sqlite",)) == set()


def test_every_mark_is_declared_and_has_its_fixture(request: pytest.FixtureRequest) -> None:
    declared = {str(line).partition(":")[0] for line in request.config.getini("markers")}
    for name in (*PROCESSES, "engine", "listener"):
        assert name in declared and request.getfixturevalue(f"starts_{name}") is None


COMMANDS = {
    "ray": ["/site-packages/ray/core/src/ray/gcs/gcs_server", "--redis_port=1"],
    "e2e": [sys.executable, "-m", RHYME, "train", "--run.dir", "x"],
    "browser": ["/site-packages/playwright/driver/node", "cli.js", "run-driver"],
    "postgresql": [sys.executable, "scripts/temporary_postgresql.py"],
    "service": [sys.executable, "-m", RHYME, "serve", "--no-local"],
    "python": [sys.executable, "-c", ""],
}


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_a_process_is_refused_in_a_test_without_its_mark(number: int) -> None:
    name = list(COMMANDS)[number]
    assert set(COMMANDS) == set(PROCESSES)
    # Also by code that goes on after any Exception.
    refused = pytest.raises(REFUSED, match=f"this test starts '{name}': ask for the fixture starts_{name}")
    with refused, contextlib.suppress(Exception):
        subprocess.Popen(COMMANDS[name])


def test_an_engine_core_is_refused_in_a_test_without_its_mark() -> None:
    with pytest.raises(REFUSED, match="starts_engine"):
        multiprocessing.get_context("spawn").Process(name=f"{ENGINE_CORE}_DP0", target=print).start()


def test_a_spawned_process_is_refused_in_a_test_without_its_mark() -> None:
    with pytest.raises(REFUSED, match="starts_python"):
        multiprocessing.get_context("spawn").Process(target=print).start()


def test_a_port_is_refused_in_a_test_without_its_mark() -> None:
    with socket.socket() as listener, pytest.raises(REFUSED, match="starts_listener"):
        listener.bind(("127.0.0.1", 0))


def test_urllib3_may_look_for_ipv6() -> None:
    # When it is imported, which the first test that needs Ray may do.
    connection = pytest.importorskip("urllib3.util.connection")
    assert connection._has_ipv6("::1") in (True, False)


def test_with_its_mark_a_port_is_listened_on(starts_listener: None) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()


def test_vllm_starts_its_engine_core_under_that_name() -> None:
    utils = pytest.importorskip("vllm.v1.engine.utils")
    assert f'else "{ENGINE_CORE}"' in Path(utils.__file__).read_text()


def test_a_real_ray_is_refused_in_a_test_without_its_mark() -> None:
    ray = pytest.importorskip("ray")
    with pytest.raises(REFUSED, match="starts_ray"):
        ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
    assert not ray.is_initialized()


def test_with_its_mark_a_process_is_started(starts_service: None) -> None:
    done = subprocess.run([sys.executable, "-c", "", RHYME, "serve"], check=False)
    assert done.returncode == 0


class Item:
    """A collected test, as far as queues go."""

    def __init__(self, file: str, name: str, *marks: str) -> None:
        self.path, self.name, self._marks = Path(file), name, marks

    def iter_markers(self) -> list[Any]:
        return [SimpleNamespace(name=mark) for mark in self._marks]


def item(file: str, name: str, *marks: str) -> Any:
    return Item(file, name, *marks)


def test_a_file_is_in_the_queue_of_what_any_of_its_tests_starts() -> None:
    items = [
        item("a.py", "1"),
        item("a.py", "2", "slow", "engine"),
        item("b.py", "3", "engine", "ray"),
        item("c.py", "4"),
    ]
    assert queues(items) == {Path("a.py"): "engines", Path("b.py"): "Ray", Path("c.py"): ""}
    assert queue_of({"e2e"}) == "Ray" and queue_of({"browser", "postgresql"}) == ""


def test_tests_are_handed_out_by_queue_and_else_by_file() -> None:
    assert scope("tests/a.py::test[x@y]@engines") == "engines"
    assert scope("tests/a.py::test[x@y]@") == scope("tests/a.py::other@") == "tests/a.py"


def test_files_with_engines_keep_their_order_and_come_first() -> None:
    before = [
        item("a.py", "1", "engine"),
        item("a.py", "2"),
        item("b.py", "3"),
        item("c.py", "4"),
        item("d.py", "5", "ray"),
    ]
    mixed = [before[n] for n in (4, 3, 1, 2, 0)]
    assert [one.name for one in unmixed(mixed, before)] == ["1", "2", "5", "4", "3"]
