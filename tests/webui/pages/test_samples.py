"""The page of kept responses: its content, and the numbers in its address."""

from pathlib import Path
from typing import Any

import pytest

from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES
from rhyme_openrlhf.settings import drafting
from rhyme_openrlhf.telemetry.draft_sources import TEXT_SOURCES, TextSource
from rhyme_openrlhf.telemetry.samples import CONTEXT
from rhyme_openrlhf.webui.pages.rendering import ENVIRONMENT, whole_number

WEBUI = Path(__file__).parents[3] / "webui"


def test_every_source_of_text_has_words_a_look_and_a_place_in_the_legend() -> None:
    assert set(TEXT_SOURCES) == {name for name in (*SOURCE_NAMES, *drafting.VLLM_METHODS) if name} | {CONTEXT}
    style = (WEBUI / "static" / "css" / "records.css").read_text()
    legend = (WEBUI / "templates" / "parts" / "samples.html").read_text()
    assert '<mark class="tone-{{ one.tone }} line-{{ one.line }}">{{ one.legend }}</mark>' in legend
    for name, source in TEXT_SOURCES.items():
        assert source.words and source.legend, name
        assert f".tone-{source.tone} {{" in style and f".line-{source.line} {{" in style, name


def test_one_entry_gives_a_source_its_mark_its_words_and_its_place_in_the_legend() -> None:
    new = TextSource("lookahead", "good", "wavy", "from a look ahead", "accepted draft, from a look ahead")
    record: dict[str, Any] = {
        "prompt": "p", "number": 0, "reward": 1.0, "tokens": 3, "accepted": 1, "drafted": 2, "engines": [0],
        "weight_versions": [0], "finish_reason": "stop", "cut": False,
        "pieces": [(new.name, "one"), ("stranger", "two")],
    }  # fmt: skip
    card = {"sample": record, "shows_prompt": False, "accepted_share": 0.3, "acceptance_rate": 0.5, "group_url": ""}
    shown = ENVIRONMENT.get_template("parts/samples.html").render(
        missing="", steps=[1], step=1, is_newest=True, previous_url=None, following_url=None, newest_url="", all_url="",
        found={"matching": 1, "unreadable": 0, "next_cursor": None}, cards=[card], next_url=None, first_url=None,
        asked={"group": "", "is_filtered": False}, sources=TEXT_SOURCES | {new.name: new}, piece_url="",
    )  # fmt: skip
    assert '<mark class="tone-good line-wavy">from a look ahead</mark>' in shown
    assert f'<mark class="tone-good line-wavy" title="{new.words}">one</mark>' in shown
    assert '<mark class="tone-warn line-dotted" title="stranger">two</mark>' in shown


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("007", 7), ("", None), ("-1", None), ("1.5", None), ("²", None), ("٣", None)]
)
def test_whole_numbers_are_decimal_digits_alone(text: str, number: int | None) -> None:
    assert whole_number(text) == number
