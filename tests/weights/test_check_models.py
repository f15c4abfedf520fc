"""Wrong weights in an engine are reported: real small models, one wrong tensor, expert or row each."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from rhyme_openrlhf import embedded
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.weights import WeightSettings
from rhyme_openrlhf.telemetry.events import Event, Note, WeightsChecked

SEED = 51
VOCABULARY = 128
EXPERTS = 8
# As many checks as see each token of the vocabulary.
ALL_SEEN = 3
Spoil = Callable[[Any, dict[str, Any]], None]


@pytest.fixture(scope="module")
def dense() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(embedded.MODEL, dtype=torch.float32)


@pytest.fixture(scope="module")
def mixture() -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(SEED)
    # Weights as large as trained ones: each expert that a token is sent to matters.
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=2,
        initializer_range=0.2,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).float()


def tokens_of_checks() -> Any:
    from rhyme_openrlhf.weights.check import CheckedTokens

    return CheckedTokens(range(VOCABULARY), SEED, 160)


class Scored:
    """A policy or engine that scores with a model."""

    def __init__(self, model: Any) -> None:
        from openrlhf.models.actor import Actor

        self.actor = Actor(model)
        self.actor.packing_samples = False
        self.score = SimpleNamespace(remote=self._score)

    def _score(self, tokens: list[int]) -> list[float]:
        from rhyme_openrlhf.weights.publisher import fixed_sequence_log_probs

        return fixed_sequence_log_probs(self.actor, tokens)

    def async_run_method(self, method: str, tokens: list[int]) -> list[list[float]]:
        return [self._score(tokens)]


def problems(model: Any, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, checks: int = 1) -> tuple[list[int], list[str]]:
    """Return the versions whose check shows a problem by the rules of `rhyme verify`, and a run's own warnings.

    Every sync brings all weights; `spoil(engine's model, its weights before)` then makes some of them wrong.
    """
    import torch

    from rhyme_openrlhf.verify.weights import judge
    from rhyme_openrlhf.weights import check as weight_check

    monkeypatch.setattr(weight_check, "wait_for", lambda refs, timeout_s, what: refs)
    recorded: list[Event] = []
    services: Any = SimpleNamespace(
        layouts=None,
        settings=RhymeSettings(weights=WeightSettings(check_syncs=checks)),
        record=lambda event, source: recorded.append(event),
    )
    policy, engine = copy.deepcopy(model), copy.deepcopy(model)
    check = weight_check.WeightCheck(Scored(policy), [Scored(engine)], services, tokens_of_checks())
    torch.manual_seed(SEED)
    for version in range(1, checks + 1):
        check.before_step()
        before = copy.deepcopy(engine.state_dict())
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
        engine.load_state_dict(policy.state_dict())
        with torch.no_grad():
            spoil(engine, before)
        check.after_sync(version)
    found = [event for event in recorded if isinstance(event, WeightsChecked)]
    wrong = [one.version for one in found if judge([one], [one.version], 1, "float32").problems]
    return wrong, [event.text for event in recorded if isinstance(event, Note)]


def nothing(engine: Any, before: dict[str, Any]) -> None:
    """All weights are right."""


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_right_weights_are_no_problem(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert problems(request.getfixturevalue(kind), nothing, monkeypatch, ALL_SEEN) == ([], [])


def test_a_nan_in_any_tensor_is_reported_at_once(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = tokens_of_checks().at(1)[20]
    for name, _ in dense.named_parameters():

        def spoil(engine: Any, before: dict[str, Any], name: str = name) -> None:
            engine.get_parameter(name)[row % len(engine.get_parameter(name))] = float("nan")

        wrong, warnings = problems(dense, spoil, monkeypatch)
        assert wrong == [1] and len(warnings) == 1, name


def same_shapes(model: Any) -> Iterator[tuple[str, str]]:
    """Yield tensors of one shape that stand next to each other in the model."""
    shapes: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters():
        shapes.setdefault(tuple(parameter.shape), []).append(name)
    for names in shapes.values():
        yield from itertools.pairwise(names)


def test_swapped_tensors_are_reported(dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list(same_shapes(dense))
    assert len(pairs) > 30
    for one, other in pairs:

        def spoil(engine: Any, before: dict[str, Any], one: str = one, other: str = other) -> None:
            first, second = engine.get_parameter(one), engine.get_parameter(other)
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)

        wrong, _ = problems(dense, spoil, monkeypatch)
        assert wrong == [1], (one, other)


def test_one_stale_expert_is_reported(mixture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stacked = [name for name, parameter in mixture.named_parameters() if ".experts." in name]
    assert {mixture.get_parameter(name).shape[0] for name in stacked} == {EXPERTS}
    for name, expert in itertools.product(stacked, range(EXPERTS)):

        def spoil(engine: Any, before: dict[str, Any], name: str = name, expert: int = expert) -> None:
            engine.get_parameter(name)[expert] = before[name][expert]

        wrong, _ = problems(mixture, spoil, monkeypatch)
        assert wrong == [1], (name, expert)


def test_a_stale_row_of_the_embedding_is_reported_when_its_token_has_its_turn(
    dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in range(0, VOCABULARY, 3):
        first: list[Any] = []

        def spoil(engine: Any, before: dict[str, Any], row: int = row, first: list[Any] = first) -> None:
            weight = engine.get_input_embeddings().weight
            # Of the weights that the engine started with.
            first.append(before["model.embed_tokens.weight"][row].clone())
            weight[row] = first[0]

        wrong, _ = problems(dense, spoil, monkeypatch, ALL_SEEN)
        # The last token's own row is no input of what is scored.
        turns = [v for v in range(1, ALL_SEEN + 1) if row in tokens_of_checks().at(v)[:-1]]
        assert wrong == turns, row
        assert turns or row == tokens_of_checks().at(1)[-1], row
