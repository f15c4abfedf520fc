"""The small run is the user's, but short, moving, and writes nowhere else; upstream's own parser takes its options."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.verify.training_arguments import REWARD, STEPS, policy_ranks, training_arguments

FOLDER = Path("/tmp/verify")


def options(args: Any, lengths: list[int], argv: tuple[str, ...] = ()) -> dict[str, str]:
    """The value that each option ends up with."""
    found = training_arguments(argv, args, Path("/tmp/p.jsonl"), lengths, FOLDER)
    return {name: value for name, value in zip(found, found[1:], strict=False) if name.startswith("--")}


def test_the_users_options_stay_and_ours_come_after_them(args: Any) -> None:
    argv = ("--ds.zero_stage", "3", "--actor.adam.lr", "1e-6", "--ckpt.load_enable", "--data.apply_chat_template")
    found = training_arguments(argv, args, Path("/tmp/p.jsonl"), [10] * 12, FOLDER)
    assert found[:4] == ["--ds.zero_stage", "3", "--actor.adam.lr", "1e-6"]
    assert "--ckpt.load_enable" not in found and "--data.apply_chat_template" not in found
    last = options(args, [10] * 12, argv)
    assert float(last["--actor.adam.lr"]) > 1e-4 and last["--actor.lr_warmup_ratio"] == "0"
    assert last["--reward.remote_url"] == str(REWARD) and REWARD.is_file()


def test_everything_is_written_below_the_folder(args: Any) -> None:
    found = options(args, [10] * 12)
    for name in ("--ckpt.path", "--ckpt.output_dir", "--run.dir"):
        assert found[name].startswith(str(FOLDER))
    assert found["--logger.wandb.key"] == found["--logger.tensorboard_dir"] == found["--eval.dataset"] == ""


@pytest.mark.parametrize("prompts", [1, 2, 3, 4, 5, 8, 11, 12])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 24])
def test_steps_are_whole_and_every_rank_gets_as_many_samples(args: Any, prompts: int, ranks: int) -> None:
    args.actor = SimpleNamespace(num_nodes=1, num_gpus_per_node=ranks)
    found = {name: int(value) for name, value in options(args, [9] * prompts).items() if value.lstrip("-").isdigit()}
    batch, samples = found["--rollout.batch_size"], found["--rollout.n_samples_per_prompt"]
    assert batch * samples == found["--train.batch_size"] and samples > 1
    assert found["--train.batch_size"] % (found["--train.micro_batch_size"] * ranks) == 0
    # Upstream's own condition.
    assert samples * batch // found["--rollout.micro_batch_size"] >= ranks
    assert found["--data.max_samples"] <= prompts and found["--data.max_samples"] % batch == 0
    assert found["--train.num_episodes"] * (found["--data.max_samples"] // batch) >= STEPS


def test_the_longest_prompt_fits(args: Any) -> None:
    found = options(args, [10, 300, 20])
    assert int(found["--data.max_len"]) - int(found["--rollout.max_new_tokens"]) == 300


def test_ranks_share_a_sample_under_ring_attention_and_tensor_parallelism(args: Any) -> None:
    args.actor = SimpleNamespace(num_nodes=2, num_gpus_per_node=8)
    args.ds = SimpleNamespace(ring_attn_size=2, tensor_parallel_size=4)
    assert policy_ranks(args) == 2


def test_upstreams_parser_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("openrlhf")
    from rhyme_openrlhf.cli import demo, upstream

    argv = [*demo.arguments(str(tmp_path)), "--data.apply_chat_template"]
    args = upstream.parse(argv)
    small = upstream.parse(training_arguments(argv, args, tmp_path / "p.jsonl", [10] * 12, tmp_path))
    assert small.rollout.batch_size == small.rollout.vllm_generate_batch_size == 4
    assert not small.data.apply_chat_template and not small.train.agent_func_path and not small.eval.dataset
    assert small.reward.remote_url == [str(REWARD)]


def test_the_reward_differs_from_sample_to_sample() -> None:
    pytest.importorskip("torch")
    from rhyme_openrlhf.verify.varied_reward import reward_func

    rewards = reward_func(["a"] * 8, ["p"] * 8, [""] * 8)["rewards"]
    assert len({round(float(reward), 6) for reward in rewards}) == 8  # type: ignore[attr-defined]
    assert all(0 <= float(reward) < 1 for reward in rewards)  # type: ignore[attr-defined]
