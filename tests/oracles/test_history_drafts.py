"""RhymeRL 5.2 to 5.4 by their text: the window, the branch with most reward, and whole samples drafted from a tree.

A prompt's tree has the responses of its last rollout. A node's priority is the sum of the rewards of the responses
through it. A draft begins behind the longest match of the last tokens and follows the child of highest priority. Its
length is the window: it grows by a step when all is accepted, and a rejection sets it back.
"""

from __future__ import annotations

import random

import pytest

from rhyme_openrlhf.drafting.budget import SpeculationWindow
from rhyme_openrlhf.drafting.source import Verified
from rhyme_openrlhf.history.index import DraftIndex, Piece, build_index
from rhyme_openrlhf.settings.drafting import HistoSpecSettings
from tests.drafting.whole_texts import WholeTexts

PARTS = [pytest.param(0), *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
WINDOWS, BRANCHES, SAMPLES = 3600, 460, 330
LONGEST, SHORTEST = 7, 3


@pytest.mark.parametrize("part", PARTS)
def test_the_window_grows_by_a_step_and_falls_to_its_start(part: int) -> None:
    draw = random.Random(part)
    start, step, most = draw.randint(1, 4), draw.randint(1, 4), draw.randint(8, 32)
    window = SpeculationWindow(HistoSpecSettings(window_start=start, window_step=step, window_max=most))
    size = start
    for _ in range(WINDOWS):
        drafted = draw.randint(0, size)
        accepted = drafted if draw.random() < 0.8 else draw.randint(0, drafted)
        window.record(drafted, accepted)
        if drafted:
            size = min(size + step, most) if accepted == drafted else start
        assert window.size == size


class Node:
    """A node of the suffix tree. `last`: where in the history, in all responses one behind the other, it was last."""

    def __init__(self) -> None:
        self.children: dict[int, Node] = {}
        self.reward, self.count, self.last = 0.0, 0, 0

    def follow(self, tokens: list[int]) -> Node | None:
        node: Node | None = self
        for token in tokens:
            node = None if node is None else node.children.get(token)
        return node


def tree(pieces: list[Piece]) -> Node:
    root, offset = Node(), 0
    for piece in pieces:
        text = [*piece.context, *piece.tokens]
        for begin in range(len(text)):
            node = root
            for place in range(begin, len(text)):
                node = node.children.setdefault(text[place], Node())
                node.reward, node.count = node.reward + piece.reward, node.count + 1
                node.last = max(node.last, offset + place)
        offset += len(text) + 1
    return root


def draft_of(root: Node, text: list[int], limit: int) -> list[int]:
    """The draft behind the longest end of `text` that goes on in the tree."""
    for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        node, draft = root.follow(text[-length:]), []
        while node is not None and node.children and len(draft) < limit:
            token, node = max(
                node.children.items(), key=lambda child: (max(child[1].reward, 0.0), child[1].count, child[1].last)
            )
            draft.append(token)
        if draft:
            return draft
    return []


def drawn(draw: random.Random) -> list[Piece]:
    """Responses to one prompt, many of which begin alike; rewards add up exactly."""
    context, pieces = [draw.randrange(4) for _ in range(4)], []
    for _ in range(draw.randint(1, 6)):
        like = list(draw.choice(pieces).tokens) if pieces and draw.random() < 0.7 else []
        tokens = like[: draw.randint(0, len(like))] + [draw.randrange(4) for _ in range(draw.randint(1, 12))]
        pieces.append(Piece(context, tokens, draw.choice([-1.0, 0.0, 0.25, 0.5, 1.0])))
    return pieces


@pytest.mark.parametrize("part", PARTS)
def test_the_branch_with_most_reward_is_drafted(part: int) -> None:
    draw = random.Random(100 + part)
    for _ in range(BRANCHES):
        pieces = drawn(draw)
        text = [*pieces[0].context, *draw.choice(pieces).tokens][: draw.randint(3, 14)]
        limit = draw.randint(1, 16)
        found = DraftIndex.from_buffer(build_index(pieces)).draft(text, LONGEST, SHORTEST, limit)
        assert found.tokens == draft_of(tree(pieces), text, limit)


@pytest.mark.parametrize("part", PARTS)
def test_whole_samples_are_drafted_as_the_paper_says(part: int) -> None:
    """Every decode step's draft, from the first token of a response to its last."""
    draw = random.Random(200 + part)
    rules = HistoSpecSettings(
        prefix_max=LONGEST, prefix_min=SHORTEST, window_max=8, own_output=False, siblings=False, shared_tokens=0,
        extend_confidence=1.0, stop_confidence=0.0,
    )  # fmt: skip
    drafter, drafted = WholeTexts(rules), 0
    for number in range(SAMPLES):
        pieces, request = drawn(draw), str(number)
        root, context = tree(pieces), list(pieces[0].context)
        like = list(draw.choice(pieces).tokens)
        response = like[: draw.randint(0, len(like))] + [draw.randrange(4) for _ in range(draw.randint(1, 10))]
        drafter.install("p", build_index(pieces))
        drafter.begin(request, "p", len(context), len(context) + len(response))
        text, window = list(context), rules.window_start
        while (left := len(context) + len(response) - len(text)) > 0:
            # One token comes from the model in any case.
            expected = draft_of(root, text, min(window, left - 1))
            assert drafter.draft_for([request], [text])[0] == expected
            rest = response[len(text) - len(context) :]
            accepted = next((n for n, token in enumerate(expected) if rest[n] != token), len(expected))
            if expected:
                drafter.verified(Verified.of([request], [len(expected)], [accepted]))
                grown = min(window + rules.window_step, rules.window_max)
                window = grown if accepted == len(expected) else rules.window_start
                drafted += accepted
            text += rest[: accepted + 1]
        assert text == context + response
        drafter.finish(request)
    assert drafted > SAMPLES
