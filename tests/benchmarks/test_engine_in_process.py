"""The scheduler of benchmarks whose drafting can be switched off: off, it drafts nothing."""

from __future__ import annotations

from types import SimpleNamespace as NS
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_in_process import PolicyDrafting

from rhyme_openrlhf.engine.scheduler_parts.drafting import Drafting


def test_what_is_off_drafts_nothing_and_every_hook_is_one_of_the_runs_own() -> None:
    left_out: list[bool] = []
    drafting: Any = PolicyDrafting.__new__(PolicyDrafting)
    drafting.source = NS(leave_out=lambda: left_out.append(True))
    drafting._off = True
    assert drafting._asked(lambda *_: [[1, 2]], ["a sample"], 0) is None
    assert left_out == [True]
    drafting._off, drafting._ticket = False, NS(drafts=True)
    drafting._most_drafts = lambda: 9
    assert drafting._asked(lambda *_: [[1, 2]], ["a sample"], 0) == [[1, 2]]
    own = {"prepare", "choose", "install_everywhere"}
    hooks = {name for name, one in vars(PolicyDrafting).items() if callable(one)} - own
    assert hooks == {name for name in hooks if hasattr(Drafting, name)}
