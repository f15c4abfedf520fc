"""`scripts/mutation_sample.py`: the changes that it tries, and those that it reports."""

import sqlite3
from contextlib import closing
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """A store as cosmic-ray 8.7 makes it, with ten changes of one line and one of an annotation."""
    path = tmp_path / "session.sqlite"
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("CREATE TABLE work_items (job_id TEXT)")
        store.execute(
            "CREATE TABLE mutation_specs (job_id TEXT, module_path TEXT, operator_name TEXT, operator_args TEXT, "
            "occurrence INTEGER, start_pos_row INTEGER, start_pos_col INTEGER)"
        )
        store.execute("CREATE TABLE work_results (job_id TEXT, test_outcome TEXT, diff TEXT, output TEXT)")
        for number in range(11):
            operator = "core/ReplaceBinaryOperator_BitOr_Add" if number == 10 else "core/NumberReplacer"
            store.execute("INSERT INTO work_items VALUES (?)", (f"job{number}",))
            spec = (f"job{number}", operator, number)
            store.execute("INSERT INTO mutation_specs VALUES (?, 'a.py', ?, '{}', 0, ?, 4)", spec)
    return path


def jobs(session: Path, table: str) -> set[str]:
    with closing(sqlite3.connect(session)) as store:
        return {job for (job,) in store.execute(f"SELECT job_id FROM {table}")}


def test_the_same_seed_keeps_the_same_changes_and_none_of_annotations(script: ModuleType, session: Path) -> None:
    assert script.keep_sample(session, 4, seed=1) == 10
    kept = jobs(session, "work_items")
    assert len(kept) == 4 and kept == jobs(session, "mutation_specs")
    assert kept == set(script.sample([f"job{number}" for number in range(10)], 4, 1))
    assert sorted(script.sample(["a", "b"], 9, 1)) == ["a", "b"]


def test_jobs_of_other_names_are_the_same_changes(script: ModuleType, session: Path) -> None:
    with closing(sqlite3.connect(session)) as store, store:
        for table in ("work_items", "mutation_specs"):
            store.execute(f"UPDATE {table} SET job_id = hex(100 - substr(job_id, 4))")
    script.keep_sample(session, 4, seed=1)
    with closing(sqlite3.connect(session)) as store:
        rows = {f"job{row}" for (row,) in store.execute("SELECT start_pos_row FROM mutation_specs")}
    assert rows == set(script.sample([f"job{number}" for number in range(10)], 4, 1))


def test_what_no_test_noticed_is_told_with_its_change(
    script: ModuleType, session: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.keep_sample(session, 3, seed=1)
    noticed, missed, late = sorted(jobs(session, "work_items"))
    with closing(sqlite3.connect(session)) as store, store:
        for name, output in ((noticed, "1 failed"), (late, "timeout")):
            store.execute("INSERT INTO work_results VALUES (?, 'TestOutcome.KILLED', '', ?)", (name, output))
        diff = "--- a.py\n+++ a.py\n@@ -1 +1 @@\n-    x = 1\n+    x = 2\n"
        store.execute("INSERT INTO work_results VALUES (?, 'TestOutcome.SURVIVED', ?, '9 passed')", (missed, diff))
    script.show(session, 10)
    said = capsys.readouterr().out
    assert f"not noticed: a.py:{missed.removeprefix('job')} (NumberReplacer)" in said
    assert "-    x = 1\n  +    x = 2" in said and "+++" not in said
    assert f"took longer than {script.TIMEOUT_S} s: a.py:{late.removeprefix('job')}\n" in said
    assert said.endswith("1 of 3 changes noticed, of 10 possible ones\n")


def test_a_modules_tests_are_its_own_file_and_then_its_room(script: ModuleType) -> None:
    found = script.tests_of("rhyme_openrlhf/scheduling/outliers.py")
    assert found == ("tests/scheduling/test_outliers.py", "tests/scheduling")
    root = script.ROOT
    assert all((root / path).exists() for path in found)
