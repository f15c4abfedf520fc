"""Values as text."""

import math

import pytest

from rhyme_openrlhf.webui.site import text


@pytest.mark.parametrize(
    "value, written",
    [
        (None, "–"),
        (math.nan, "–"),
        (math.inf, "–"),
        (0, "0"),
        (0.0, "0"),
        (12345, "12,345"),
        (12345.6, "12,346"),
        (43.123, "43.1"),
        (3.456, "3.46"),
        (0.04321, "0.0432"),
        (-0.5, "-0.500"),
        (0.00001234, "1.23e-05"),
    ],
)
def test_numbers_have_about_three_digits(value: float | None, written: str) -> None:
    assert text.number(value) == written


@pytest.mark.parametrize(
    "value, written",
    [(None, "–"), (999, "999"), (1000, "1.0k"), (12_345, "12.3k"), (456_000, "456k"), (-2.5e6, "-2.5M")],
)
def test_compact_numbers(value: float | None, written: str) -> None:
    assert text.compact(value) == written


def test_shares_and_changes() -> None:
    assert text.percent(0.5734) == "57.3%"
    assert text.percent(None) == "–"
    assert text.change(0.0432) == "+0.0432"
    assert text.change(-12.0) == "−12"
    assert text.change(0.0) == "±0"
    assert text.change(0.012, is_share=True) == "+1.2 points"
    assert text.change(-0.0001, is_share=True) == "±0.0 points"
    assert text.ratio(1.4159) == "1.42×"
    assert text.share(3, 4) == 0.75
    assert text.share(5, 4) == 1.0
    assert text.share(1, None) is None
    assert text.share(1, 0) is None


@pytest.mark.parametrize(
    "seconds, written",
    [
        (None, "–"),
        (4.23, "4.2 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 05 min"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
        (-1, "0.0 s"),
    ],
)
def test_durations(seconds: float | None, written: str) -> None:
    assert text.duration(seconds) == written


@pytest.mark.parametrize(
    "seconds, written",
    [
        (-5, "just now"),
        (59, "just now"),
        (300, "5 min ago"),
        (7300, "2 h ago"),
        (200_000, "2 d ago"),
        (4e6, "2026-01-16"),
    ],
)
def test_how_long_ago(seconds: float, written: str) -> None:
    now = 1_772_582_400.0  # 2026-03-04 00:00:00 UTC
    assert text.ago(now - seconds, now) == written


def test_moments_are_in_utc() -> None:
    assert text.moment(1_772_582_405.9) == "2026-03-04 00:00:05 UTC"
    assert text.iso(1_772_582_405.0) == "2026-03-04T00:00:05+00:00"
    assert text.moment(None) == text.ago(None, 0.0) == "–"


def test_every_curve_that_is_named_exists() -> None:
    from rhyme_openrlhf.api.read.curves import RATIOS
    from rhyme_openrlhf.api.store.step_figures import COLUMNS, FIGURES

    assert set(text.LABELS) <= {*COLUMNS, *FIGURES, *RATIOS}
    assert text.label("actor/kl") == "actor/kl"


def test_parts_in_backticks_are_code_and_markup_is_text() -> None:
    assert text.coded("run `rhyme <x>` & wait") == "run <code>rhyme &lt;x&gt;</code> &amp; wait"
    assert text.coded("a lone ` stays") == "a lone ` stays"


def test_a_model_is_told_apart_by_the_end_of_its_path() -> None:
    assert text.short_path("/opt/models/qwen/step-20") == "qwen/step-20"
    assert text.short_path("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
