"""The last words of a process of Ray."""

from __future__ import annotations

from pathlib import Path

from rhyme_openrlhf.run.process_logs import TAIL_LINES, core_error, last_lines

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
    assert last_lines(tmp_path, 77) == [*(f"line {n}" for n in range(5000 - TAIL_LINES + 1, 5000)), "the end"]
    assert last_lines(tmp_path, 78) == []


def test_the_error_of_an_engine_core_is_not_the_one_that_followed_from_it(tmp_path: Path) -> None:
    (tmp_path / "worker-ab-01-77.out").write_text(CORE)
    (tmp_path / "worker-ab-01-77.err").write_text(FRONT)
    (tmp_path / "worker-ab-01-78.err").write_text("ValueError: of another process\n")
    assert core_error(tmp_path, 77) == "ModuleNotFoundError: No module named 'flashinfer'"
    # Nothing is known but that it failed.
    (tmp_path / "worker-ab-01-79.err").write_text(FRONT)
    assert core_error(tmp_path, 79) == ""
    assert core_error(tmp_path, 80) == ""
