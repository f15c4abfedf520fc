"""From experiences to what the history workers keep."""

from types import SimpleNamespace

import torch

from rhyme_openrlhf.history.keys import owner, prompt_key
from rhyme_openrlhf.training.experience import by_worker, response_pieces


def mask(*generated: int) -> torch.Tensor:
    return torch.tensor(generated, dtype=torch.bool)


def test_a_single_turn_is_one_piece_with_the_end_of_its_prompt() -> None:
    sequence = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 0])
    (piece,) = response_pieces(sequence, mask(0, 0, 0, 1, 1, 1, 0, 0), 0.5, context=3)
    assert (list(piece.context), list(piece.tokens), piece.reward) == ([2, 3, 4], [5, 6, 7], 0.5)


def test_each_turn_of_a_conversation_is_a_piece() -> None:
    sequence = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    pieces = response_pieces(sequence, mask(1, 1, 0, 0, 1, 1, 1), 1.0, context=7)
    assert [(list(p.context), list(p.tokens)) for p in pieces] == [([1], [2, 3]), ([1, 2, 3, 4, 5], [6, 7, 8])]


def test_nothing_generated_gives_no_piece() -> None:
    assert response_pieces(torch.tensor([1, 2, 3]), mask(0, 0), 1.0, context=7) == []


def test_rows_go_to_the_worker_that_owns_their_prompt() -> None:
    prompts = ["p0", "p1", "p2", "p0"]
    experience = SimpleNamespace(
        prompts=prompts,
        sequences=torch.arange(24).reshape(4, 6),
        action_mask=torch.tensor([[0, 0, 1, 1, 1]] * 4, dtype=torch.bool),
        info={"reward": torch.tensor([1.0, 0.0, 0.5, 0.25])},
    )
    shares = by_worker([experience], workers=3, context=7)
    found = {rollout.prompt_key: (number, rollout) for number, rollouts in shares.items() for rollout in rollouts}
    assert found.keys() == {prompt_key(prompt) for prompt in prompts}
    for key, (number, _) in found.items():
        assert number == owner(key, 3)
    twice = found[prompt_key("p0")][1]
    assert twice.lengths == (3, 3)
    assert [piece.reward for piece in twice.pieces] == [1.0, 0.25]
