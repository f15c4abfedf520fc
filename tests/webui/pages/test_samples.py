"""The page of kept responses: its content, and the numbers in its address."""

from pathlib import Path

import pytest

from rhyme_openrlhf.drafting.drafter import SOURCE_NAMES
from rhyme_openrlhf.settings import drafting
from rhyme_openrlhf.telemetry.samples import CONTEXT
from rhyme_openrlhf.webui.pages.rendering import whole_number
from rhyme_openrlhf.webui.pages.samples import SOURCES

WEBUI = Path(__file__).parents[3] / "webui"


def test_every_source_of_text_has_words_a_look_and_a_place_in_the_legend() -> None:
    assert set(SOURCES) == {name for name in (*SOURCE_NAMES, *drafting.VLLM_METHODS) if name} | {CONTEXT}
    style = (WEBUI / "static" / "css" / "records.css").read_text()
    legend = (WEBUI / "templates" / "parts" / "samples.html").read_text()
    for source in SOURCES:
        assert f".piece-{source}" in style and f'<mark class="piece-{source}">' in legend, source


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("007", 7), ("", None), ("-1", None), ("1.5", None), ("²", None), ("٣", None)]
)
def test_whole_numbers_are_decimal_digits_alone(text: str, number: int | None) -> None:
    assert whole_number(text) == number
