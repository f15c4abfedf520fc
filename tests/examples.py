"""The number of hypothesis examples: all that a test asks for, or a fifth in `scripts/test.sh --quick`."""

from __future__ import annotations

from hypothesis import settings

# Fewer would leave most branches of a state machine out.
LEAST = 10


def examples(asked: int) -> int:
    """Return the number of examples of a test that asks for `asked`."""
    return max(asked // 5, LEAST) if settings.get_current_profile_name() == "quick" else asked
