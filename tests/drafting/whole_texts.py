"""A drafter that is told each sample's whole text, so that a test says what there is and not what is new."""

from __future__ import annotations

from collections.abc import Sequence

from rhyme_openrlhf.drafting.drafter import HistoryDrafter
from rhyme_openrlhf.settings.drafting import HistoSpecSettings


class WholeTexts(HistoryDrafter):
    """Appends what it has not seen of each text."""

    def __init__(self, settings: HistoSpecSettings) -> None:
        super().__init__(settings)
        self._seen: dict[str, int] = {}

    def begin(
        self, request: str, key: str | None, prompt_tokens: int, most_tokens: int, window: int | None = None
    ) -> None:
        """Start a sample whose text is still to come."""
        self.start(request, key, [], prompt_tokens, most_tokens, window)
        self._seen[request] = 0

    def tell(self, requests: Sequence[str], texts: Sequence[list[int]]) -> None:
        """These are the texts now."""
        new = [text[self._seen.get(request, 0) :] for request, text in zip(requests, texts, strict=True)]
        self._seen.update({request: len(text) for request, text in zip(requests, texts, strict=True)})
        self.append(requests, new)

    def draft_for(
        self, requests: Sequence[str], texts: Sequence[list[int]], context: int = 0, most: int | None = None
    ) -> list[list[int]]:
        """Make the drafts of a step, for samples with these texts."""
        self.tell(requests, texts)
        drafts = self.draft(requests, context, most)
        self.computing()
        return drafts
