"""`scripts/check_words.py`: what it finds in each kind of text, and what it lets pass."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LONG = " ".join(["word"] * 31) + "."


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "scripts" / "check_words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "rules"),
    [
        ('def f():\n    """Whose it is."""', ["opening"]),
        ('def f():\n    """The number."""', ["opening"]),
        ('def f():\n    """Return the number."""', []),
        ('class F:\n    """The number."""', []),
        ("class F:\n    @property\n    def f(self):\n        'The number.'", []),
        ('"""Whatever comes."""', ["opening", "word"]),
        ("# As long as it takes, whoever waits.", ["word"]),
        (f"# {LONG}", ["long"]),
        (f"# {LONG[:40]}\n# {LONG[40:]}", ["long"]),
        # Sentences that end before a small letter, and code that counts as one word.
        ("# " + "one two three. " * 12, []),
        (f"# `{LONG}` is code.", []),
        ('raise ValueError(f"{name} takes so many")', ["word"]),
        ('raise ValueError("a" + f"{name} takes so many")', ["word"]),
        (f'parser.add_argument("--x", help="{LONG}")', ["long"]),
        (f'x: int = option(1, "{LONG}")', ["long"]),
        ('print("whatever")', ["word"]),
        # A string that no user reads.
        ('name = "whatever"', []),
    ],
)
def test_python(check: ModuleType, source: str, rules: list[str]) -> None:
    assert [one.rule for one in check.of_python("rhyme_openrlhf/x.py", source)] == rules


def test_a_tests_docstring_is_any_sentence(check: ModuleType) -> None:
    source = 'def test_f():\n    """The number stays."""'
    assert list(check.of_python("tests/test_x.py", source)) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"# Head\n\n{LONG}\n", [(3, "long")]),
        (f"```\n{LONG}\n```\n\n| {LONG} |\n", []),
        ("- one\n- whatever\n", [(2, "word")]),
        # A link's address is no text.
        ("[a page](whatever.md)\n", []),
    ],
)
def test_markdown(check: ModuleType, source: str, found: list[tuple[int, str]]) -> None:
    assert [(one.line, one.rule) for one in check.of_markdown("docs/x.md", source)] == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"<p>\n{LONG}</p>", [(1, "long")]),
        (f"<p>{LONG[:40]}<b>{LONG[40:]}</b></p>", [(1, "long")]),
        (f"<p>{LONG[:40]}</p><p>{LONG[40:]}</p>", []),
        (
            "{# whatever #}{% set whatever = 1 %}{{ whatever }}<script>\nwhatever</script>\n<p>whatever</p>",
            [(3, "word")],
        ),
    ],
)
def test_templates(check: ModuleType, source: str, found: list[tuple[int, str]]) -> None:
    assert [(one.line, one.rule) for one in check.of_template("webui/templates/x.html", source)] == found


def test_a_term_of_ours_needs_a_row_in_the_table_of_words(check: ModuleType) -> None:
    source = "Two rank groups\nlose a rank\ngroup, and `seat` is code."
    assert [one.rule for one in check.unexplained("docs/x.md", source, set())] == ["term"]
    assert list(check.unexplained("docs/x.md", source, {"rank group"})) == []


def test_every_term_is_explained(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert set(check.TERMS) - check.explained_terms() == set()
