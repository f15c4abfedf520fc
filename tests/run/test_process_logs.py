"""The last words of a process of Ray."""

from __future__ import annotations

from pathlib import Path

from rhyme_openrlhf.run.process_logs import TAIL_LINES, core_error, core_error_of_process, last_lines

# What vLLM 0.29.0 prints when an engine core cannot start, shortened.
CORE = """\
:actor_name:RhymeRolloutActor
(EngineCore pid=78) ERROR 11-26 01:16:40 [core.py:1251] EngineCore failed to start.
(EngineCore pid=78) ERROR 11-26 01:16:40 [core.py:1251] Traceback (most recent call last):
(EngineCore pid=78) ERROR 11-26 01:16:40 [core.py:1251]   File "flashinfer.py", line 10, in <module>
(EngineCore pid=78) ERROR 11-26 01:16:40 [core.py:1251] ModuleNotFoundError: No module named 'flashinfer'
"""
FRONT = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"


def test_the_last_lines_of_a_log(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-01-77.out").write_text(":job_id:01\n" + "\n".join(f"line {n}" for n in range(5000)))
    (tmp_path / "worker-ab-01-77.err").write_text("the end\n")
    assert last_lines([tmp_path], "ab") == [*(f"line {n}" for n in range(5000 - TAIL_LINES + 1, 5000)), "the end"]
    assert last_lines([tmp_path], "abc") == last_lines([tmp_path], "") == []


def test_a_process_of_another_node_with_the_same_number_is_not_quoted(tmp_path: Path) -> None:
    session, copies = tmp_path / "session", tmp_path / "run"
    session.mkdir()
    copies.mkdir()
    (session / "worker-ab-01-77.err").write_text("ValueError: of a process here\n")
    (copies / "worker-cd-01-77.err").write_text(FRONT + "KeyError: of a process on another node\n")
    folders = (session, copies)
    assert last_lines(folders, "cd")[-1] == core_error(folders, "cd") == "KeyError: of a process on another node"
    assert last_lines(folders, "ab") == [core_error(folders, "ab")] == ["ValueError: of a process here"]
    assert last_lines(folders, "ef") == [] and core_error(folders, "ef") == ""


def test_the_error_of_an_engine_core_is_not_the_one_that_followed_from_it(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-01-77.out").write_text(CORE)
    (tmp_path / "worker-ab-01-77.err").write_text(FRONT)
    (tmp_path / "worker-ac-01-78.err").write_text("ValueError: of another process\n")
    assert core_error([tmp_path], "ab") == "ModuleNotFoundError: No module named 'flashinfer'"
    assert core_error_of_process(tmp_path, 77) == core_error([tmp_path], "ab")
    # Nothing is known but that it failed.
    (tmp_path / "worker-ad-01-79.err").write_text(FRONT)
    assert core_error([tmp_path], "ad") == core_error_of_process(tmp_path, 79) == ""
    assert core_error([tmp_path], "ae") == core_error_of_process(tmp_path, 80) == ""
