"""How many tokens a sample may draft in its next decode step.

A congestion window as in TCP (RhymeRL, section 5.4): a draft that was accepted whole lets the window grow by a fixed
step, any rejection takes it back to its start. Long runs of repeated text then get long drafts, and text that is new
wastes little verification.

Invariant: window_start <= size <= window_max.
"""

from __future__ import annotations

from rhyme_openrlhf.settings.drafting import HistoSpecSettings


def next_window(size: int, verified: int, accepted: int, start: int, step: int, most: int) -> int:
    """The window after a draft of which `verified` tokens, one at least, were verified and so many accepted.

    `start`, `step`, `most`: `window_start`, `window_step` and `window_max` of the settings.
    """
    return min(size + step, most) if accepted == verified else start


class SpeculationWindow:
    """The window of one sample. Its whole state is `size`, so a sample that moves takes a plain int with it."""

    def __init__(self, settings: HistoSpecSettings, size: int | None = None) -> None:
        """Starts at `settings.window_start`, or at `size` if the sample had a window before.

        Raises ValueError for a `size` that no window of these settings can have.
        """
        self._settings = settings
        self._size = settings.window_start if size is None else size
        if not settings.window_start <= self._size <= settings.window_max:
            raise ValueError(
                f"a window is from {settings.window_start} to {settings.window_max} tokens, got {self._size}"
            )

    @property
    def size(self) -> int:
        """Most draft tokens of the next decode step."""
        return self._size

    def record(self, drafted: int, accepted: int) -> None:
        """Learn what became of one draft, in tokens. Raises ValueError unless 0 <= accepted <= drafted."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"need 0 <= accepted <= drafted, got {accepted} accepted of {drafted} drafted")
        if drafted:
            rules = self._settings
            self._size = next_window(
                self._size, drafted, accepted, rules.window_start, rules.window_step, rules.window_max
            )
