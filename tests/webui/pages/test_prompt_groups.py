"""The page of prompts: a step's groups, one prompt through training, its tokens; hostile text is text."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.telemetry.sample_table import GAP_BOUNDS, encoded_table
from rhyme_openrlhf.telemetry.samples import TABLE, file_name
from rhyme_openrlhf.webui.figures.sample_figures import SAMPLE_FIGURES
from rhyme_openrlhf.webui.pages.prompt_groups import MOST_TOKENS
from rhyme_openrlhf.webui.pages.samples import chosen_step

KEPT, OTHER = "a" * 32, "b" * 32
EVIL = [
    "<think>", "<script>document.title='owned'</script>", "</think>", "**bold** ", "\\(x^2\\) ",
    "<img src=x onerror=\"document.title='owned'\">", "[x](javascript:alert(1)) ", "\x1b[31m", "\u202e",
    "tool: ok", "end",
]  # fmt: skip
SOURCES = ["", "", "", "history", "", "", "", "", "", "context", ""]
LOG_PROBS = [-0.01, -0.9, -2.0, -4.0, -5.0, -8.0, -0.1, -0.1, -0.1, None, -0.1]


def a_row(number: int, step: int, **more: Any) -> dict[str, Any]:
    written = {
        "prompt": "What is <b>x</b>?\u202e", "label": "42", "response": "".join(EVIL), "token_texts": EVIL,
        "token_sources": SOURCES, "log_probs": LOG_PROBS, "engine_log_probs": [-0.01] * len(EVIL), "accepted": 1,
    }  # fmt: skip
    return {
        "step": step, "number": number, "group": KEPT, "reward": number / 4, "advantage": 0.5, "tokens": 10,
        "finish_reason": "stop", "age": 1, "engines": [0, 1], "gap_counts": [1] * (len(GAP_BOUNDS) + 1),
        "part.format": 0.125, **(written if more.get("group", KEPT) == KEPT else {}), **more,
    }  # fmt: skip


@pytest.fixture
def with_samples(dashboard: Any, run_directory: Path) -> Any:
    folder = run_directory / "samples"
    folder.mkdir()
    for step, keys in ((1, (KEPT, OTHER)), (2, (OTHER,)), (3, (KEPT, OTHER))):
        rows = [
            a_row(4 * place + n, step, group=key, **({"reward": 1.0} if key == OTHER else {}))
            for place, key in enumerate(keys)
            for n in range(4)
        ]
        (folder / file_name(step, TABLE)).write_bytes(encoded_table(rows))
    return dashboard


def page_of(with_samples: Any, **query: Any) -> str:
    answer = with_samples.signed_in("viewer").get(f"/runs/{with_samples.run_uid}/prompts", params=query)
    assert answer.status_code == 200
    return str(answer.text)


def test_a_steps_groups_say_which_have_no_signal(with_samples: Any) -> None:
    page = page_of(with_samples)
    assert "2 prompt groups" in page and "<strong>1 without a signal</strong>" in page
    assert "What is &lt;b&gt;x&lt;/b&gt;?[U+202E]" in page and OTHER[:12] in page
    for name in SAMPLE_FIGURES:
        assert f"/sample-figures/{name}" in page


def test_a_prompt_alone_has_its_own_steps(with_samples: Any) -> None:
    page = page_of(with_samples, group=KEPT)
    assert "2 of 2 steps with this prompt, 1 to 3" in page and 'data-steps="1 3"' in page
    (before,) = re.findall(r'href="([^"]*)" rel="prev" data-key="ArrowLeft"', page)
    assert "step=1" in before and f"group={KEPT}" in before
    assert 'rel="next"' not in page
    assert "1 of 2 steps with this prompt" in page_of(with_samples, group=KEPT, step="2")


def test_steps_are_chosen_from_those_that_there_are() -> None:
    assert chosen_step([], "1") is None and chosen_step([1, 5], "") == 5
    assert [chosen_step([2, 5], asked) for asked in ("1", "2", "4", "9", "x")] == [2, 2, 2, 5, 5]


def test_a_group_is_a_table_with_parts_and_equal_answers_as_one_row(with_samples: Any, run_directory: Path) -> None:
    rows = [a_row(number, 4, reward=float(number == 3)) for number in range(4)]
    (run_directory / "samples" / file_name(4, TABLE)).write_bytes(encoded_table(rows))
    page = page_of(with_samples, group=KEPT)
    table = page[page.index('class="table group-table"') : page.index("</table>")]
    assert table.count("<tr") == 3 and "× 3" in table
    assert "format" in table and "0.125" in table and "stop, moved" in table and "10%" in table
    assert "mean reward <strong>0.250</strong>" in page and ">42<" in page


def test_hostile_text_is_text_in_every_view(with_samples: Any) -> None:
    for view in ("read", "raw", "tokens"):
        page = page_of(with_samples, group=KEPT, view=view)
        assert "<script>document" not in page and "<img src=x" not in page and "javascript:" in html.unescape(page)
        assert "\x1b" not in page and "\u202e" not in page and "\\x1b[31m" in page, view
    page = page_of(with_samples, group=KEPT)
    assert "<strong>bold</strong>" in page and '<code class="math">\\(x^2\\)</code>' in page
    assert '<details class="thinking" open>' in page and page.count('<section class="turn') == 3


def test_tokens_are_coloured_by_what_is_asked_for(with_samples: Any) -> None:
    def heats(**query: Any) -> list[str]:
        page = page_of(with_samples, group=KEPT, view="tokens", **query)
        return re.findall(r'class="heat heat-(\d)" title', page)

    assert heats() == ["0", "1", "2", "3", "4", "5", "0", "0", "0", "0", "0"]
    assert heats(colour="gap")[:4] == ["0", "4", "5", "5"]
    page = page_of(with_samples, group=KEPT, view="tokens", colour="source")
    assert 'title="token 4; trainer -4.000 (1.8%); engine -0.010; gap −3.99; ' in html.unescape(page)


def test_a_long_response_shows_its_first_tokens(with_samples: Any, run_directory: Path) -> None:
    many = ["a"] * (MOST_TOKENS + 5)
    row = a_row(
        0, 4, token_texts=many, token_sources=[""] * len(many), log_probs=[-1.0] * len(many), engine_log_probs=None
    )
    (run_directory / "samples" / file_name(4, TABLE)).write_bytes(encoded_table([row]))
    page = page_of(with_samples, group=KEPT, view="tokens")
    assert page.count(">a</span>") == MOST_TOKENS and "The first 4,000 tokens." in page


def test_a_sample_whose_text_was_not_kept_says_so(with_samples: Any) -> None:
    page = page_of(with_samples, group=OTHER)
    assert "was not kept" in page and "No signal" in page


def test_figures_answer(with_samples: Any) -> None:
    client = with_samples.signed_in("viewer")
    for name in SAMPLE_FIGURES:
        answer = client.get(f"/ui/runs/{with_samples.run_uid}/sample-figures/{name}", params={"step": 1})
        assert answer.status_code == 200 and answer.json()["data"], name


def test_keys_and_slider_go_through_training_and_nothing_hostile_runs(with_samples: Any, browser_page: Any) -> None:
    browser_page.goto(with_samples.link("viewer"))
    browser_page.goto(f"{with_samples.url}/runs/{with_samples.run_uid}/prompts?group={KEPT}")
    browser_page.keyboard.press("ArrowLeft")
    browser_page.wait_for_url("**step=1*")
    slider = browser_page.locator("input[data-steps]")
    slider.focus()
    slider.press("End")
    browser_page.wait_for_url("**step=3*")
    browser_page.locator("h2").first.click()
    browser_page.keyboard.press("r")
    browser_page.wait_for_url("**view=raw*")
    assert "<script>document.title='owned'</script>" in browser_page.locator("article pre").inner_text()
    assert "owned" not in browser_page.title()
