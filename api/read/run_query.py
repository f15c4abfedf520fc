"""The language in which people filter runs: `reward > 0.5 and config.actor.adam.lr = 1e-6`. Pure: text to a tree.

    query      = all ("or" all)*
    all        = one ("and" one)*
    one        = "not" one | "(" query ")" | name operator value
    operator   = "=" | "!=" | "<" | "<=" | ">" | ">=" | "~" (contains, ignoring case)
    value      = number | word | "text" | 'text'

Names are those of `run_values.py`. The size of a query is bounded, so that no client can make it expensive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

MOST_LETTERS = 1000
MOST_COMPARISONS = 30
MOST_LEVELS = 20
Operator = Literal["=", "!=", "<", "<=", ">", ">=", "~"]

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<text>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
        |(?P<operator><=|>=|!=|[=<>~])
        |(?P<bracket>[()])
        |(?P<word>[^\s()=<>!~"']+)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class QueryError(ValueError):
    """A query that cannot be understood; the message is one sentence."""


@dataclass(frozen=True)
class Comparison:
    """A condition on one value. A quoted `value` is never a number."""

    name: str
    operator: Operator
    value: str
    is_quoted: bool = False

    @property
    def number(self) -> float | None:
        """The value as a number, or None."""
        if self.is_quoted:
            return None
        try:
            found = float(self.value)
        except ValueError:
            return None
        return found if math.isfinite(found) else None


@dataclass(frozen=True)
class Not:
    """The opposite of a condition."""

    part: Node


@dataclass(frozen=True)
class Every:
    """A condition that holds if every part holds."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Some:
    """A condition that holds if at least one part holds."""

    parts: tuple[Node, ...]


Node = Comparison | Not | Every | Some


def parse(text: str) -> Node:
    """Return the tree of a query. Raises QueryError."""
    if len(text) > MOST_LETTERS:
        raise QueryError(f"a filter has at most {MOST_LETTERS} letters")
    return _Parser(_tokens(text)).whole()


@dataclass(frozen=True)
class _Token:
    """A piece of a query, and the number of the letter at which it begins. `kind`: the group of `_TOKEN`."""

    kind: str
    text: str
    at: int


def _tokens(text: str) -> list[_Token]:
    found = []
    at = 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            rest = text[at:].lstrip()
            begin = len(text) - len(rest)
            reason = "a text is not closed" if rest[0] in "\"'" else f"{rest[0]!r} is no operator"
            raise QueryError(f"{reason} (letter {begin + 1})")
        kind = match.lastgroup or ""
        found.append(_Token(kind, match[kind], match.start(kind)))
        at = match.end()
    return found


class _Parser:
    """One pass over the tokens, from left to right."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._comparisons = 0

    def whole(self) -> Node:
        node = self._some(0)
        if self._at < len(self._tokens):
            raise self._expected('"and", "or" or the end')
        return node

    def _some(self, level: int) -> Node:
        parts = [self._every(level)]
        while self._takes("or"):
            parts.append(self._every(level))
        return parts[0] if len(parts) == 1 else Some(tuple(parts))

    def _every(self, level: int) -> Node:
        parts = [self._one(level)]
        while self._takes("and"):
            parts.append(self._one(level))
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _one(self, level: int) -> Node:
        if level > MOST_LEVELS:
            raise QueryError(f"a filter has at most {MOST_LEVELS} levels of brackets")
        if self._takes("not"):
            return Not(self._one(level + 1))
        if self._takes("(", "bracket"):
            node = self._some(level + 1)
            if not self._takes(")", "bracket"):
                raise self._expected('")"')
            return node
        return self._comparison()

    def _comparison(self) -> Comparison:
        self._comparisons += 1
        if self._comparisons > MOST_COMPARISONS:
            raise QueryError(f"a filter has at most {MOST_COMPARISONS} comparisons")
        name = self._next("word", "a name, such as reward or config.actor.adam.lr")
        operator = self._next("operator", f"one of {', '.join(get_args(Operator))}")
        if self._at < len(self._tokens) and self._tokens[self._at].kind == "text":
            text = self._next("text", "").text
            return Comparison(name.text, _operator(operator), _ESCAPED.sub(r"\1", text[1:-1]), True)
        return Comparison(name.text, _operator(operator), self._next("word", "a value").text)

    def _takes(self, text: str, kind: str = "word") -> bool:
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            if token.kind == kind and token.text.lower() == text:
                self._at += 1
                return True
        return False

    def _next(self, kind: str, expected: str) -> _Token:
        if self._at == len(self._tokens) or self._tokens[self._at].kind != kind:
            raise self._expected(expected)
        self._at += 1
        return self._tokens[self._at - 1]

    def _expected(self, what: str) -> QueryError:
        if self._at == len(self._tokens):
            return QueryError(f"expected {what} at the end of the filter")
        token = self._tokens[self._at]
        return QueryError(f"expected {what} instead of {token.text[:40]!r} (letter {token.at + 1})")


def _operator(token: _Token) -> Operator:
    found: Operator = next(one for one in get_args(Operator) if one == token.text)
    return found
