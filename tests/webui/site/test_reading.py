"""Responses as HTML: Markdown and formulas are read, and nothing in them can act."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_openrlhf.webui.site.reading import LONGEST_FORMULA, MOST_PARSED, passages, rendered, visible

# All that is written besides text.
TAGS = re.compile(r"</?(?:p|br|strong|em|code|pre|h[1-6]|ul|ol|li|blockquote|hr|table|thead|tbody|tr|th|td)(?: /)?>")
ATTRIBUTES = re.compile(r'<(?:code class="(?:math)"|ol start="\d+")>')


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("**bold** *it* `x<y`", "<p><strong>bold</strong> <em>it</em> <code>x&lt;y</code></p>"),
        ("```js onload=x\n<b>\n```", "<pre><code>&lt;b&gt;\n</code></pre>"),
        ("\\(a_b*c*\\)", '<p><code class="math">\\(a_b*c*\\)</code></p>'),
        ("$$\nx < y\n$$", '<p><code class="math">$$\nx &lt; y\n$$</code></p>'),
        ("$5 and $6", "<p>$5 and $6</p>"),
        ("|a|\n|:-|\n|1|", "<table>\n<thead>\n<tr>\n<th>a</th>"),
        ("a\nb", "<p>a<br />\nb</p>"),
    ],
)
def test_markdown_and_formulas_are_read(text: str, html: str) -> None:
    assert rendered(text).strip().startswith(html)


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!-- x --><style>*{}</style>",
        "[x](javascript:alert(1))", "![x](http://evil/x.png)", "<http://evil>", "[x]: http://evil\n\n[x]",
        "$\\href{javascript:alert(1)}{<b>}$", "```<b>\"'\n</code></pre><script>\n```", "|<b>|\n|:-:|\n|<i>|",
        "`</code><script>`", "# <b>", "&lt;script&gt;", "<think><b></think><script>",
    ],
)  # fmt: skip
def test_nothing_of_a_hostile_text_can_act(text: str) -> None:
    html = "".join(passage.html for passage in passages(text))
    left = ATTRIBUTES.sub("", TAGS.sub("", html))
    assert "<" not in left and ">" not in left, html
    assert "href" not in html.replace("\\href", "") and "src=" not in re.sub(r"&lt;.*?&gt;|!\[x\].*", "", html)


@given(st.text(alphabet="<>&\"'`$\\()[]*_#|-:! \nab\x1b\u202e", max_size=60))
def test_whatever_is_written_only_known_elements_come_out(text: str) -> None:
    left = ATTRIBUTES.sub("", TAGS.sub("", rendered(text)))
    assert "<" not in left and ">" not in left
    assert "\x1b" not in left and "\u202e" not in left


def test_hidden_characters_are_shown() -> None:
    assert visible("a\x1b[31m\u202eb\x00\x85\n\t") == "a\\x1b[31m[U+202E]b\\x00\\x85\n\t"
    assert visible("plain ä 😀") == "plain ä 😀"


def test_thinking_is_a_passage_of_its_own_also_if_the_prompt_opened_it() -> None:
    assert [(one.thinking, one.html.strip()) for one in passages("<think>a</think>b")] == [
        (True, "<p>a</p>"), (False, "<p>b</p>"),
    ]  # fmt: skip
    assert [one.thinking for one in passages("a</think>b")] == [True, False]
    assert [one.thinking for one in passages("x<think>never closed")] == [False, True]
    assert [one.thinking for one in passages("b")] == [False]


def test_long_texts_come_as_they_are_and_long_formulas_are_text() -> None:
    assert rendered("*a*" * MOST_PARSED).startswith("<pre>*a*")
    assert "math" not in rendered(f"\\({'x' * (LONGEST_FORMULA + 1)}\\)")
