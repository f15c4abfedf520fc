"""An interruption reaches the driver."""

from __future__ import annotations

import pytest

from rhyme_openrlhf.training.failure import Interrupted, unmasked_interruptions


@pytest.mark.parametrize("interruption", [Interrupted, KeyboardInterrupt])
def test_an_interruption_behind_a_system_error_is_itself_again(interruption: type[BaseException]) -> None:
    with pytest.raises(interruption), unmasked_interruptions():
        raise SystemError("returned a result with an exception set") from interruption()


def test_other_system_errors_stay() -> None:
    with pytest.raises(SystemError, match="bad call"), unmasked_interruptions():
        raise SystemError("bad call") from ValueError()
    with pytest.raises(SystemError, match="no cause"), unmasked_interruptions():
        raise SystemError("no cause")
