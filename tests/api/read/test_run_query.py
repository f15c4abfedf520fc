"""The filter language: every tree is read back from its text, and any text gives a tree or a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.api.read.run_query import (
    MOST_COMPARISONS,
    MOST_LETTERS,
    MOST_LEVELS,
    Comparison,
    Every,
    Node,
    Not,
    QueryError,
    Some,
    parse,
)

WORDS = st.from_regex(r"[a-z_][a-z0-9_.]{0,10}", fullmatch=True).filter(lambda word: word not in ("and", "or", "not"))
QUOTED = st.text(max_size=12)
OPERATORS = st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"])
COMPARISONS = st.builds(Comparison, WORDS, OPERATORS, WORDS) | st.builds(
    Comparison, WORDS, OPERATORS, QUOTED, st.just(True)
)


def trees(parts: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    several = st.lists(parts, min_size=2, max_size=3).map(tuple)
    return st.builds(Not, parts) | st.builds(Every, several) | st.builds(Some, several)


TREES = st.recursive(COMPARISONS, trees, max_leaves=8)


def written(node: Node) -> str:
    """Return the text of a tree, with brackets around every part."""
    if isinstance(node, Comparison):
        quoted = '"' + node.value.replace("\\", "\\\\").replace('"', '\\"') + '"'
        return f"{node.name} {node.operator} {quoted if node.is_quoted else node.value}"
    if isinstance(node, Not):
        return f"not ({written(node.part)})"
    word = " and " if isinstance(node, Every) else " or "
    return word.join(f"({written(part)})" for part in node.parts)


@given(TREES)
def test_a_tree_is_read_back_from_its_text(tree: Node) -> None:
    try:
        assert parse(written(tree)) == tree
    except QueryError as error:
        assert "at most" in str(error)


@given(st.text(alphabet="ab.1 =<>!~\"'()\\andort\n\0é", max_size=60))
def test_any_text_gives_a_tree_or_a_sentence(text: str) -> None:
    try:
        parse(text)
    except QueryError as error:
        assert str(error) and "\n" not in str(error)


def test_and_binds_closer_than_or() -> None:
    a, b, c = (Comparison(name, "=", "1") for name in "abc")
    assert parse("a=1 or b=1 and c=1") == Some((a, Every((b, c))))
    assert parse("a=1 AND not b=1 and (c=1)") == Every((a, Not(b), c))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "expected a name, such as reward or config.actor.adam.lr at the end"),
        ("reward", "expected one of =, !="),
        ("reward >", "expected a value at the end"),
        ("reward > 1 step = 2", "instead of 'step' (letter 12)"),
        ("(reward > 1", 'expected ")" at the end'),
        ("name = 'a", "a text is not closed (letter 8)"),
        ("reward ! 1", "'!' is no operator (letter 8)"),
        ("a=1 " * 400, f"at most {MOST_LETTERS} letters"),
        ("a=1" + " or a=1" * MOST_COMPARISONS, f"at most {MOST_COMPARISONS} comparisons"),
        ("(" * (MOST_LEVELS + 2) + "a=1", f"at most {MOST_LEVELS} levels"),
        ("not " * 200 + "a=1", f"at most {MOST_LEVELS} levels"),
    ],
)
def test_a_wrong_filter_says_what_is_expected_and_where(text: str, says: str) -> None:
    with pytest.raises(QueryError) as error:
        parse(text)
    assert says in str(error.value)
