"""The way from experiences to history workers and to the samples that people read."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from rhyme_openrlhf.history.worker import PlainHistoryWorker
from rhyme_openrlhf.prompt_keys import owner, prompt_key, round_key
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.settings.telemetry import TelemetrySettings
from rhyme_openrlhf.telemetry.events import OffPolicyness
from rhyme_openrlhf.telemetry.samples import ROUNDS, Round
from rhyme_openrlhf.training.experience import RhymeExperienceMaker, by_worker, response_pieces, rewards_by_sample
from rhyme_openrlhf.training.updates import UpdateError
from tests.ray_handles import handle_of


def mask(*generated: int) -> torch.Tensor:
    return torch.tensor(generated, dtype=torch.bool)


def test_a_single_round_is_one_piece_with_the_end_of_its_prompt() -> None:
    sequence = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 0])
    (piece,) = response_pieces(sequence, mask(0, 0, 0, 1, 1, 1, 0, 0), 0.5, context=3)
    assert (list(piece.context), list(piece.tokens), piece.reward) == ([2, 3, 4], [5, 6, 7], 0.5)


def test_each_round_of_a_conversation_is_a_piece() -> None:
    sequence = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8])
    pieces = response_pieces(sequence, mask(1, 1, 0, 0, 1, 1, 1), 1.0, context=7)
    assert [(list(p.context), list(p.tokens)) for p in pieces] == [([1], [2, 3]), ([1, 2, 3, 4, 5], [6, 7, 8])]


@pytest.mark.parametrize("critic", [False, True])
def test_a_step_that_ranks_cannot_share_is_refused_before_it_is_trained_on(
    monkeypatch: pytest.MonkeyPatch, critic: bool
) -> None:
    """12 samples in experiences of two: two ranks share them, four do not."""
    experiences = [SimpleNamespace(index=[0, 1], info={}) for _ in range(6)]
    monkeypatch.setattr(RemoteExperienceMaker, "make_experience_batch", lambda self, samples: experiences)
    monkeypatch.setattr(RhymeExperienceMaker, "_record", lambda *_: None)
    groups = [SimpleNamespace(_actor_handlers=[0] * ranks, duplicate_actors=1) for ranks in (2, 4)]
    train = SimpleNamespace(dynamic_batch_enable=False, micro_batch_size=1)
    maker = RhymeExperienceMaker.__new__(RhymeExperienceMaker)
    maker.args, maker.step = SimpleNamespace(train=train), 7
    maker.services = SimpleNamespace(history_workers=())  # type: ignore[assignment]
    maker.actor_model_group, maker.critic_model_group = groups[0], None
    assert maker.make_experience_batch([0] * 12) == experiences and maker.samples == 12
    if critic:
        maker.critic_model_group = groups[1]
    else:
        maker.actor_model_group = groups[1]
    with pytest.raises(UpdateError, match="step 7 has 12 samples, of which 4 ranks would train 4 and 0 micro-batches"):
        maker.make_experience_batch([0] * 12)
    # By length, upstream gives each rank as many micro-batches.
    train.dynamic_batch_enable = True
    assert maker.make_experience_batch([0] * 12) == experiences


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


def test_rewards_are_found_whatever_order_upstream_put_the_samples_into() -> None:
    experiences = [
        SimpleNamespace(index=[2, 0], info={"reward": torch.tensor([0.5, 1.0])}),
        SimpleNamespace(index=[1], info={"reward": torch.tensor([0.25])}),
    ]
    assert rewards_by_sample(experiences) == {2: 0.5, 0: 1.0, 1: 0.25}


class Recorded:
    """Stands for the run's services: keeps what is recorded."""

    def __init__(self, groups: int) -> None:
        self.settings = RhymeSettings(telemetry=TelemetrySettings(sample_groups=groups))
        self.events: list[Any] = []
        self.samples: list[tuple[int, list[bytes]]] = []
        self.tables: list[tuple[int, list[dict[str, Any]]]] = []
        self.recorder = SimpleNamespace(
            write_samples=SimpleNamespace(remote=lambda *given: self.samples.append(given)),
            write_sample_table=SimpleNamespace(remote=lambda *given: self.tables.append(given)),
        )

    def record(self, event: Any, source: str) -> None:
        self.events.append(event)


@pytest.mark.parametrize("groups", [0, 2])
def test_a_steps_age_and_its_chosen_responses_are_recorded(groups: int) -> None:
    samples = []
    for number in range(4):
        noted = Round(number % 2, 6 if number else 4, 2, "t" if number < 2 else "", 2, 7, "stop", 3, [(0, 1, "own")])
        sample = SimpleNamespace(prompts=[f"p{number}"], sequences=torch.tensor([[1, 2, 3, 4]]))
        setattr(sample, ROUNDS, [noted])
        samples.append(sample)
    samples.append(SimpleNamespace(prompts=["of an agent that asks nobody"], sequences=torch.tensor([[1]])))
    maker = RhymeExperienceMaker.__new__(RhymeExperienceMaker)
    maker.services = services = Recorded(groups)  # type: ignore[assignment]
    maker.step = 7
    maker.tokenizer = SimpleNamespace(decode=lambda tokens, **_: "".join(map(str, tokens)))
    experience = Experience(
        sequences=torch.tensor([[1, 2, 3, 4]] * 5),
        attention_mask=torch.ones(5, 4),
        action_mask=torch.tensor([[0, 1, 1]] * 5),
        index=[1, 0, 2, 3, 4],
        prompts=["p1", "p0", "p2", "p3", "p4"],
        info={"reward": torch.tensor([0.5, 1, 0, 0, 0])},
    )
    maker._record(samples, [experience])
    assert services.events == [OffPolicyness(7, [0, 2], [3, 1], [6, 2])]
    if not groups:
        assert services.samples == services.tables == []
        return
    ((_, rows),) = services.tables
    assert [row["reward"] for row in rows] == [1.0, 0.5, 0, 0, 0]
    assert [row.get("response") for row in rows] == ["34", "34", None, None, None]
    ((step, lines),) = services.samples
    records = [json.loads(line) for line in lines]
    assert step == 7 and [record["prompt"] for record in records] == ["p0", "p1"]
    assert [record["reward"] for record in records] == [1.0, 0.5]
    assert records[0]["pieces"] == [["own", "3"], ["", "4"]] and records[0]["weight_versions"] == [4, 7]


def test_each_round_has_a_history_of_its_own_and_lengths_are_of_whole_samples() -> None:
    experience = SimpleNamespace(
        prompts=["p", "p", "silent"],
        sequences=torch.arange(24).reshape(3, 8),
        action_mask=torch.tensor([[1, 1, 0, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0], [0] * 7], dtype=torch.bool),
        info={"reward": torch.tensor([1.0, 0.5, 0.0])},
    )
    (rollouts,) = by_worker([experience], workers=1, context=2).values()
    found = {one.prompt_key: one for one in rollouts}
    key, silent = prompt_key("p"), prompt_key("silent")
    assert found.keys() == {key, round_key(key, 1), silent}
    assert [list(piece.tokens) for piece in found[key].pieces] == [[1, 2], [10]]
    assert [list(piece.tokens) for piece in found[round_key(key, 1)].pieces] == [[5, 6, 7]]
    assert (found[key].lengths, found[round_key(key, 1)].lengths) == ((5, 1), ())
    assert (found[silent].pieces, found[silent].lengths) == ((), (0,))


def test_ranks_are_compared_after_the_last_step_of_an_epoch_only() -> None:
    maker = RhymeExperienceMaker.__new__(RhymeExperienceMaker)
    told: tuple[list[Any], list[Any]] = ([], [])
    workers = [handle_of(PlainHistoryWorker, lambda name, *given, told=of: told.append((name, given))) for of in told]
    for steps_per_epoch, expected in ((3, 2), (None, 0)):
        maker.services = SimpleNamespace(steps_per_epoch=steps_per_epoch, epoch_of=lambda step: (step - 1) // 3 + 1)
        for one in told:
            one.clear()
        for step in range(1, 9):
            maker.step = step
            maker._compare_ranks(workers)
        spans = [given for name, given in told[1] if name == "epoch_lengths"]
        assert spans == [(1, 3), (4, 6)][:expected]
        assert [given[0] for name, given in told[0] if name == "report_ranks"] == [1, 2][:expected]


def test_evaluations_never_reach_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses are recorded where experiences are made, which an evaluation never does."""
    import openrlhf.trainer.ppo_trainer as upstream

    from rhyme_openrlhf.training.trainer import RhymePPOTrainer

    monkeypatch.setattr(upstream, "compute_eval_metrics", lambda loader, samples, n: {"eval_pass1": len(samples)})
    trainer = RhymePPOTrainer.__new__(RhymePPOTrainer)
    trainer.samples_generator = SimpleNamespace(generate_eval_samples=lambda **_: ["sample"])
    trainer.eval_dataloader = trainer.wandb_logger = trainer.tensorboard_logger = None
    # No workers and no experience maker: asking for either would fail.
    trainer.services = SimpleNamespace(record=lambda event, source: None)
    assert trainer.evaluate(3, n_samples_per_prompt=4) == {"eval_pass1": 1}
    assert not hasattr(trainer, "experience_maker")


def test_extra_logs_that_some_samples_lack_become_the_mean_of_the_others() -> None:
    from rhyme_openrlhf.training.experience import align_logs, fill_logs

    def samples(*infos: dict[str, float]) -> list[Any]:
        return [
            SimpleNamespace(info={key: torch.tensor([value]) for key, value in info.items()}, sequences=[[1, 2]])
            for info in infos
        ]

    first = samples({"reward": 1.0, "steps": 2}, {"reward": 0.0, "error": 1.0})
    second = samples({"reward": 0.0, "steps": 4}, {"reward": 0.0})
    partial = align_logs(first) | align_logs(second)
    partial |= align_logs([*first, *second])
    fill_logs([*first, *second], partial)
    assert partial == {"steps", "error"}
    assert [one.info["steps"].item() for one in [*first, *second]] == [2, 3, 4, 3]
    assert [one.info["error"].item() for one in [*first, *second]] == [1, 1, 1, 1]
    # A log of all samples that is NaN stays it: it may be the run's own, such as the KL.
    spoilt = samples({"kl": float("nan")}, {"kl": 1.0})
    fill_logs(spoilt, align_logs(spoilt))
    assert spoilt[0].info["kl"].isnan()
