"""HistoPipe's settings: what belongs together."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.settings.histopipe import HistoPipeSettings
from rhyme_openrlhf.settings.options import SettingsError


def test_deferring_without_the_pipeline_is_refused() -> None:
    with pytest.raises(SettingsError, match="--histopipe.defer needs --histopipe.enable"):
        HistoPipeSettings(defer=True)


def test_the_pipeline_may_defer() -> None:
    assert HistoPipeSettings(enable=True, defer=True).defer
