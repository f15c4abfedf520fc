"""Text of a model as safe HTML: Markdown, code, formulas and thinking, with hidden characters shown.

Invariants: the text of a model is hostile. No markup of its own passes, and there are no links and no pictures, so
nothing is fetched and nothing runs. All other text is escaped. A text that is too long to be parsed quickly comes
as it is.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markupsafe import Markup

# Longest text that is parsed as Markdown, about 5,000 tokens.
MOST_PARSED = 20_000
LONGEST_FORMULA = 2000
OPEN, CLOSE = "<think>", "</think>"
# Marks that turn the direction of the text behind them, also of the page's own.
_DIRECTIONS = {0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)}
_KEPT = "\n\t"
_MATH = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))


@dataclass(frozen=True)
class Passage:
    """A stretch of a response that is read as one. `thinking`: the model wrote it before its answer."""

    html: Markup
    thinking: bool = False


def visible(text: str) -> str:
    """Return a text in which control characters and marks of direction are written out: an escape is \\x1b."""
    return "".join(map(_sign, text)) if any(map(_hidden, text)) else text


def _hidden(character: str) -> bool:
    return character not in _KEPT and (
        ord(character) in _DIRECTIONS or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")
    )


def _sign(character: str) -> str:
    if not _hidden(character):
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"[U+{code:04X}]"


def passages(text: str) -> list[Passage]:
    """Return a response as what the model thought and what it answered, each as HTML."""
    before, closed, after = text.partition(CLOSE)
    # A prompt may open the thinking that the response closes.
    lead, opened, thought = before.partition(OPEN)
    if not opened and closed:
        lead, thought = "", before
    parts = [(lead, False), (thought, True), (after, False)]
    return [Passage(rendered(part), thinking) for part, thinking in parts if part.strip()]


def rendered(text: str) -> Markup:
    """Return a text as HTML."""
    text = visible(text)
    if len(text) > MOST_PARSED:
        return Markup("<pre>{}</pre>").format(text)
    # The parser has escaped all of the text.
    return Markup(_MARKDOWN.render(text))


def _math(state: StateInline, silent: bool) -> bool:
    """Take a formula as it stands, so that Markdown changes nothing in it."""
    for begin, end in _MATH:
        if not state.src.startswith(begin, state.pos):
            continue
        first = state.pos + len(begin)
        last = state.src.find(end, first, first + LONGEST_FORMULA)
        inside = state.src[first:last]
        # "$5 and $6" are prices.
        if last < 0 or not inside.strip() or (begin == "$" and (inside[0].isspace() or inside[-1].isspace())):
            continue
        if not silent:
            state.push("math", "", 0).content = state.src[state.pos : last + len(end)]
        state.pos = last + len(end)
        return True
    return False


def _write_math(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    return str(Markup('<code class="math">{}</code>').format(tokens[index].content))


def _write_fence(self: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    return str(Markup("<pre><code>{}</code></pre>\n").format(tokens[index].content))


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True, "maxNesting": 20}).enable("table")
    parser.disable(["link", "autolink", "image", "reference", "html_inline", "html_block"])
    parser.inline.ruler.before("escape", "math", _math)
    parser.add_render_rule("math", _write_math)
    parser.add_render_rule("fence", _write_fence)
    parser.add_render_rule("th_open", lambda *_: "<th>")
    parser.add_render_rule("td_open", lambda *_: "<td>")
    return parser


_MARKDOWN = _parser()
