"""The quick tier's option: an import of the training stack skips the test or the file, every other import works."""

from __future__ import annotations

import importlib
import sys

import pytest

from tests.without_training_stack import STACK, install


@pytest.mark.parametrize("name", STACK)
def test_an_import_of_the_stack_skips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for module in [loaded for loaded in sys.modules if loaded.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    install()
    with pytest.raises(pytest.skip.Exception, match=f"imports {name}"):
        importlib.import_module(f"{name}.of_it")
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)
