"""What a scheduled step contains, as a profile is asked for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.latency.pace import StepContent


def test_decoding_samples_and_prefills_are_told_apart() -> None:
    pytest.importorskip("vllm")
    from rhyme_openrlhf.rollout.pacing import Pacing

    def request(outputs: int, computed: int) -> Any:
        return SimpleNamespace(num_output_tokens=outputs, num_computed_tokens=computed)

    # Scheduling has counted the step's own tokens: 30 of "a" were there before.
    requests = {"a": request(5, 34), "b": request(1, 21), "new": request(0, 64), "longer": request(0, 512)}
    output = SimpleNamespace(num_scheduled_tokens={"a": 4, "b": 1, "new": 64, "longer": 128})
    found = Pacing._content(SimpleNamespace(requests=requests), output, 7.0)  # type: ignore[arg-type]
    assert found == StepContent(7.0, running=2, context=30 + 20, drafts=3, prefills=(64, 128))
