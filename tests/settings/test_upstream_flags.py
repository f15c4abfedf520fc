"""Every flag of OpenRLHF's command is judged, with a sentence and a page where it is not the same."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("openrlhf")

from rhyme_openrlhf.cli import upstream
from rhyme_openrlhf.settings.upstream_flags import UPSTREAM_FLAGS

DOCS = Path(__file__).parents[2] / "docs"


def test_every_flag_of_openrlhfs_parser_is_judged_and_no_other() -> None:
    flags = {action.option_strings[0] for action in upstream.options()}
    assert flags - set(UPSTREAM_FLAGS) == set(), "judge these in settings/upstream_flags.py"
    assert set(UPSTREAM_FLAGS) - flags == set(), "OpenRLHF has these no more"


def test_what_is_not_the_same_is_said_in_a_sentence() -> None:
    for flag, judged in UPSTREAM_FLAGS.items():
        assert bool(judged.sentence) == (judged.verdict != "the same"), flag
        assert not judged.sentence or judged.sentence.endswith("."), flag
        assert bool(judged.page) == (judged.verdict == "different"), flag
        assert not judged.page or (DOCS / judged.page).is_file(), flag
