"""`scripts/changed_tests.py`: a change needs the tests that import it, and more where that cannot be known."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SOURCES = {
    "rhyme_openrlhf/__init__.py": "",
    "rhyme_openrlhf/history/__init__.py": "",
    "rhyme_openrlhf/prompt_keys.py": "",
    "rhyme_openrlhf/history/index.py": "from ..prompt_keys import owner",
    "rhyme_openrlhf/cli/main.py": 'COMMANDS = {"serve": "rhyme_openrlhf.cli.serve"}',
    "rhyme_openrlhf/cli/serve.py": "def main():\n    from rhyme_openrlhf.api import database",
    "rhyme_openrlhf/alone.py": "",
    "api/database.py": "",
    "migrations/versions/0001_first.py": "",
    "scripts/one.py": "",
    "tests/conftest.py": (
        "import pytest\n@pytest.fixture\ndef store():\n    from rhyme_openrlhf.api import database\n"
        "@pytest.fixture\ndef service(store):\n    pass\n"
    ),
    "tests/history/conftest.py": "from tests.history import helper",
    "tests/history/helper.py": "",
    "tests/history/test_index.py": "import rhyme_openrlhf.history.index",
    "tests/history/test_plain.py": "",
    "tests/api/test_database.py": "def test(store):\n    pass",
    "tests/api/test_service.py": "def test(service):\n    pass",
    "tests/cli/test_main.py": 'import subprocess\nsubprocess.run(["-m", "rhyme_openrlhf.cli.main"])',
    "tests/scripts/test_one.py": 'PATH = "one.py"',
    "tests/test_pages.py": 'FOLDER = "docs"',
}
FILES = {*SOURCES, "webui/static/x.js", "tests/history/rows.json", "docs/page.md", "README.md", "odd.bin"}
TESTS = {path for path in SOURCES if path.rpartition("/")[2].startswith("test_")}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("rhyme_openrlhf/prompt_keys.py", {"tests/history/test_index.py"}),
        ("rhyme_openrlhf/history/__init__.py", {"tests/history/test_index.py"}),
        # Through a text that is started as a module, a table of commands, a deferred import, a link, and two fixtures.
        ("api/database.py", {"tests/cli/test_main.py", "tests/api/test_database.py", "tests/api/test_service.py"}),
        ("rhyme_openrlhf/cli/serve.py", {"tests/cli/test_main.py"}),
        ("tests/history/helper.py", {"tests/history/test_index.py", "tests/history/test_plain.py"}),
        ("tests/history/conftest.py", {"tests/history/test_index.py", "tests/history/test_plain.py"}),
        ("tests/history/test_plain.py", {"tests/history/test_plain.py"}),
        ("scripts/one.py", {"tests/scripts/test_one.py"}),
        ("scripts/other.sh", {"tests/scripts/test_one.py"}),
        ("migrations/versions/0001_first.py", {"tests/api/test_database.py", "tests/api/test_service.py"}),
        ("tests/history/rows.json", {"tests/history/test_index.py", "tests/history/test_plain.py"}),
        ("docs/page.md", {"tests/test_pages.py"}),
        ("README.md", set()),
        # It is gone: who used it is asked.
        ("rhyme_openrlhf/history/removed.py", {"tests/history/test_index.py", "tests/history/test_plain.py"}),
        ("rhyme_openrlhf/alone.py", TESTS),
        ("odd.bin", TESTS),
        ("pyproject.toml", TESTS),
        ("requirements/constraints-cpu.txt", TESTS),
        ("tests/conftest.py", TESTS),
    ],
)
def test_a_change_needs_the_tests_that_use_it(script: ModuleType, changed: str, tests: set[str]) -> None:
    assert set(script.needed([changed], SOURCES, FILES)) == tests


def test_the_reason_is_the_shortest_way_and_changes_add_up(script: ModuleType) -> None:
    found = script.needed(["rhyme_openrlhf/prompt_keys.py", "scripts/one.py"], SOURCES, FILES)
    assert found == {
        "tests/history/test_index.py": (
            "rhyme_openrlhf/prompt_keys.py <- rhyme_openrlhf/history/index.py <- tests/history/test_index.py"
        ),
        "tests/scripts/test_one.py": "scripts/one.py <- tests/scripts/test_one.py",
    }


def test_it_reads_this_repository(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=script.ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git checkout")
    assert script.main(["no-such-branch"]) == 2
    assert "git knows no 'no-such-branch'" in capsys.readouterr().err
    assert script.main(["HEAD"]) == 0
    out, err = capsys.readouterr()
    assert "test files" in err and all((script.ROOT / line).is_file() for line in out.splitlines())
    paths = [Path(line) for line in script.git("ls-files", "*.py") if not (script.ROOT / line).is_symlink()]
    sources = {str(path): (script.ROOT / path).read_text() for path in paths if (script.ROOT / path).is_file()}
    found = script.needed(["rhyme_openrlhf/prompt_keys.py"], sources, sources)
    assert {"tests/test_prompt_keys.py", "tests/history/test_worker.py"} <= set(found)
    assert "tests/api/test_batch.py" not in found
