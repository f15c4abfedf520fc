"""The resources of a run: its GPUs, against OpenRLHF's placement, and the memory of its models."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace as NS
from typing import Any

import pytest

from rhyme_openrlhf.api.launch.spec import upstream_arguments
from rhyme_openrlhf.api.launch.spec_command import from_argv
from rhyme_openrlhf.run.model_shape import ModelShape, Shapes, model_shape, read_shapes
from rhyme_openrlhf.run.resources import Layout, Share, as_text, layout_of, plan, required_gpus, shared_memory, shares
from tests.run.model_configurations import DEEPSEEK_V2_LITE, QWEN3_8B


def run(**changes: object) -> NS:
    args = NS(
        vllm=NS(num_engines=2, tensor_parallel_size=2),
        actor=NS(num_nodes=1, num_gpus_per_node=4),
        ref=NS(num_nodes=1, num_gpus_per_node=4),
        critic=NS(num_nodes=1, num_gpus_per_node=2, model_name_or_path=None),
        reward=NS(num_nodes=1, num_gpus_per_node=2, remote_url=["reward.py"]),
        algo=NS(kl=NS(init_coef=0.01)),
        tp_switch=NS(enable=False),
        train=NS(colocate_all=False, async_enable=False, colocate_actor_ref=False, colocate_critic_reward=False),
    )
    for path, value in changes.items():
        node, _, leaf = path.rpartition("__")
        target = args
        for name in node.split("__"):
            target = getattr(target, name)
        setattr(target, leaf, value)
    return args


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, 4 + 4 + 4),
        # Further layouts are on the same devices.
        ({"tp_switch__enable": True}, 4 + 4 + 4),
        ({"tp_switch__enable": True, "train__colocate_all": True}, 4),
        ({"algo__kl__init_coef": 0}, 4 + 4),
        ({"train__colocate_actor_ref": True}, 4 + 4),
        ({"critic__model_name_or_path": "m"}, 12 + 2),
        ({"critic__model_name_or_path": "m", "reward__remote_url": None}, 12 + 2 + 2),
        (
            {
                "critic__model_name_or_path": "m",
                "reward__remote_url": None,
                "train__colocate_critic_reward": True,
            },
            12 + 2,
        ),
        ({"train__colocate_all": True}, 4),
        ({"train__colocate_all": True, "train__async_enable": True}, 4 + 4),
    ],
)
def test_gpus(changes: dict[str, object], gpus: int) -> None:
    assert required_gpus(run(**changes)) == gpus


def test_who_shares_which_gpus() -> None:
    def named(**changes: object) -> list[tuple[tuple[str, ...], int]]:
        return [(share.models, share.gpus) for share in shares(run(**changes))]

    assert named() == [(("engines",), 4), (("actor",), 4), (("reference",), 4)]
    assert named(train__colocate_actor_ref=True) == [(("engines",), 4), (("actor", "reference"), 4)]
    both = {"critic__model_name_or_path": "m", "reward__remote_url": None, "train__colocate_critic_reward": True}
    assert named(**both)[-1] == (("critic", "reward"), 2)
    assert named(train__colocate_all=True) == [(("engines", "actor", "reference"), 4)]
    taking_turns_is_over = {"train__colocate_all": True, "train__async_enable": True}
    assert named(**taking_turns_is_over) == [(("engines",), 4), (("actor", "reference"), 4)]


GIB = 2**30


def policy(stage: int, **changed: Any) -> list[float]:
    shape = ModelShape("m", 1000, 2, 4, 8, 100)
    layout = Layout((Share(("actor",), 8),), {"actor": 8}, zero_stage=stage, **changed)
    (gpu,) = plan(Shapes(shape), layout).gpus
    return [part.size for part in gpu.parts]


def test_stages_and_offloading_share_the_sixteen_bytes() -> None:
    assert [sum(policy(stage)) for stage in range(4)] == [16000, 5500, 3750, 2000]
    assert policy(2) == [2000, 250, 1500] and policy(3, adam_offload=True) == [250, 250]
    # Two tensor-parallel halves, each divided over four ranks; LoRA trains next to nothing.
    assert policy(3, policy_parallel=2) == [250, 250, 1500] and policy(2, trained=0.0) == [2000, 0, 0]


def grpo(*options: str) -> Layout:
    """The layout of a run of Qwen3 8B on 8 GPUs, as OpenRLHF's parser and ours read it."""
    base = [
        "--actor.model_name_or_path=Qwen/Qwen3-8B", "--vllm.num_engines=4", "--actor.num_gpus_per_node=4",
        "--algo.kl.init_coef=0", "--reward.remote_url=reward.py", "--data.max_len=8192", "--rollout.batch_size=128",
        "--rollout.n_samples_per_prompt=8", "--algo.advantage.estimator=group_norm", "--weights.transport=openrlhf",
    ]  # fmt: skip
    return layout_of(upstream_arguments(from_argv([*base, *options])[1]))


def test_every_gpu_of_a_run_has_its_parts() -> None:
    qwen = model_shape(QWEN3_8B)
    assert qwen is not None
    found = plan(Shapes(qwen), grpo("--ds.zero_stage=3"), 80 * GIB)
    engine, actor = found.gpus
    assert (engine.name, engine.share.gpus, actor.name, actor.share.gpus) == ("engine", 4, "policy", 4)
    parts = {part.what: part.size for part in engine.parts}
    assert parts["weights"] == pytest.approx(16.38e9, rel=0.001)
    # Eight rows for each of 128 samples, and one for each that joins: in 16 bits, and a chunk that has them all in 32.
    assert parts["rows of the sampler"] == 1152 * (2 + 4) * 151936
    assert parts["KV cache of one sample at full length"] == 147456 * 8192
    assert engine.least == pytest.approx(sum(parts.values()) / 0.95) and engine.samples == pytest.approx(
        (0.95 * 80 * GIB - parts["weights"] - parts["rows of the sampler"]) / (147456 * 8192)
    )
    assert sum(part.size for part in actor.parts) == pytest.approx(16 * 8.19e9 / 4, rel=0.001)
    assert not found.problem
    assert "policy, 4 GPUs: at least 30.5 GiB each, 80.0 GiB are there" in as_text(found)


# Engines and trainer on the same GPUs.
TOGETHER = ("--train.colocate_all", "--vllm.num_engines=4")


@pytest.mark.parametrize(
    ("options", "gib", "flags"),
    [
        (["--ds.zero_stage=3"], 80, ""),
        (["--ds.zero_stage=1"], 24, "--ds.zero_stage 3 --ds.adam_offload"),
        (["--ds.zero_stage=2"], 40, "--ds.zero_stage 3"),
        (["--ds.zero_stage=3", "--vllm.gpu_memory_utilization=0.3"], 32, "--vllm.gpu_memory_utilization 0.95"),
        (["--ds.zero_stage=3", "--ds.adam_offload"], 16, "--vllm.tensor_parallel_size 2 --vllm.num_engines 2"),
        ([*TOGETHER, "--vllm.gpu_memory_utilization=0.4"], 48, "--ds.adam_offload"),
        ([*TOGETHER, "--vllm.gpu_memory_utilization=0.6"], 80, "--vllm.gpu_memory_utilization 0.45"),
        (["--ds.zero_stage=3"], 2, "no flag makes it fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_flag_that_makes_it_fit(options: list[str], gib: int, flags: str) -> None:
    qwen = model_shape(QWEN3_8B)
    assert qwen is not None
    found = plan(Shapes(qwen), grpo(*options), gib * GIB)
    assert flags in found.problem and bool(found.problem) == bool(flags)
    if flags.startswith("--"):
        assert found.problem.endswith(f": {flags} would make it fit")
        given = re.findall(r"(--[\w.]+)(?: ([\d.]+))?", found.problem.partition("GiB: ")[2])
        flat = [word for pair in given for word in pair if word]
        mended = {
            problem.share.models: problem for problem in plan(Shapes(qwen), grpo(*options, *flat), gib * GIB).gpus
        }
        first = next(gpu for gpu in found.gpus if gpu.problem)
        assert not mended[first.share.models].problem


def test_experts_are_weights_of_an_engine_and_its_cache_is_what_attention_keeps() -> None:
    lite = model_shape(DEEPSEEK_V2_LITE)
    assert lite is not None
    parts = {part.what: part.size for part in plan(Shapes(lite), grpo("--vllm.tensor_parallel_size=2")).gpus[0].parts}
    assert parts["weights"] == lite.parameters == pytest.approx(15.7e9, rel=0.01)
    # 27 layers of 576 numbers, on both ranks.
    assert parts["KV cache of one sample at full length"] == 27 * 576 * 2 * 8192


def test_rows_of_the_sampler_follow_the_samples_and_their_drafts() -> None:
    def rows(*options: str) -> int:
        return grpo(*options).rows

    assert rows("--no-histospec.enable") == 128 and rows("--histospec.window_max=2") == 384 and rows() == 1024
    assert rows("--engine.max_num_seqs=500") == 2048
    assert rows("--engine.max_num_seqs=100", "--engine.max_num_batched_tokens=700") == 700


def test_memory_of_rows_is_that_of_the_runs_model_runner() -> None:
    def size(*options: str) -> float:
        return grpo(*options).sampler_bytes(151936) / 1e9

    v1, v2 = "--drafting.runner=v1", "--drafting.runner=v2-async"
    assert [round(size(v1), 2), round(size(v2), 2)] == [1.87, 1.05]
    # As 'auto' is decided on GPUs.
    assert size() == size(v2) and size("--drafting.source=ngram", "--drafting.tokens=32") == size(v1)
    many = "--engine.max_num_seqs=256"
    assert [round(size(v1, many), 2), round(size(v2, many), 2)] == [3.73, 1.77]
    # A chunk in 32 bits has 1 GiB at most, also with a large vocabulary.
    assert grpo(v2, many).sampler_bytes(1 << 20) == pytest.approx(2304 * 2 * (1 << 20) + 2**30)
    assert size(v2, "--no-histospec.enable") == pytest.approx(128 * 6 * 151936 / 1e9)


def test_rows_that_do_not_fit_name_the_samples_at_once() -> None:
    small = ModelShape("m", 1000, 2, 4, 8, 1 << 18)
    layout = dataclasses.replace(grpo("--drafting.runner=v2-async"), longest=1, shares=(Share(("engines",), 1),))
    (fitting,) = plan(Shapes(small), layout, 2 * GIB).gpus
    (gpu,) = plan(Shapes(small), layout, GIB).gpus
    assert not fitting.problem and gpu.mend == "--engine.max_num_seqs 64 would make it fit"
    mended = dataclasses.replace(layout, sequences=64)
    assert not plan(Shapes(small), mended, GIB).problem and plan(Shapes(small), layout, GIB).problem


def test_colocated_models_take_turns_or_share() -> None:
    qwen = model_shape(QWEN3_8B)
    assert qwen is not None
    together = ("--train.colocate_all", "--vllm.num_engines=4", "--ds.zero_stage=3")
    (awake,) = plan(Shapes(qwen), grpo(*together, "--vllm.gpu_memory_utilization=0.5"), 80 * GIB).gpus
    (asleep,) = plan(
        Shapes(qwen), grpo(*together, "--vllm.gpu_memory_utilization=0.5", "--vllm.enable_sleep"), 80 * GIB
    ).gpus
    assert awake.name == "engine + policy" and awake.least == pytest.approx(2 * 16 * 8.19e9 / 4, rel=0.001)
    # Only what rests beside the awake engine counts twice; here training decides.
    assert asleep.least == awake.least
    (both,) = plan(
        Shapes(qwen),
        grpo(*together, "--vllm.gpu_memory_utilization=0.5", "--vllm.enable_sleep", "--ds.enable_sleep"),
        80 * GIB,
    ).gpus
    assert both.least < awake.least and not both.problem
    (full,) = plan(Shapes(qwen), grpo(*together), 80 * GIB).gpus
    assert "--vllm.gpu_memory_utilization 0.6" in full.problem


def test_the_buffer_decides_what_shared_memory_is_needed() -> None:
    qwen = model_shape(QWEN3_8B)
    assert qwen is not None
    assert shared_memory(qwen, grpo()) == GIB
    assert shared_memory(qwen, grpo("--weights.transport=buffer")) == pytest.approx(GIB + 2 * 16.38e9, rel=0.001)
    nodes = {need.what for need in plan(Shapes(qwen), grpo("--ds.adam_offload")).nodes}
    assert nodes == {"/dev/shm", "optimizer, offloaded", "history, at most"}


# As their publishers' config.json, but for names that the plan does not read.
QWEN25_1_5B = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
    "num_hidden_layers": 28, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 151936,
}  # fmt: skip
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip
OWN_SIZES = (
    "--vllm.num_engines=2 --vllm.tensor_parallel_size=4 --actor.num_nodes=4 --actor.num_gpus_per_node=8 "
    "--ref.num_nodes=4 --ref.num_gpus_per_node=8 --ds.zero_stage=3 --ds.adam_offload --reward.num_gpus_per_node=1 "
    "--critic.num_gpus_per_node=2 --reward.model_name_or_path=a/reward --critic.model_name_or_path=a/critic"
)


def large(*options: str) -> Layout:
    """The layout of a 70B policy on 32 GPUs with a critic on two and a reward model on one."""
    base = ["--actor.model_name_or_path=a/70b", "--data.max_len=4096", "--algo.advantage.estimator=gae"]
    return layout_of(upstream_arguments(from_argv([*base, *OWN_SIZES.split(), *options])[1]))


def test_critic_and_reward_model_have_their_own_size() -> None:
    policy_, small = model_shape(LLAMA_70B), model_shape(QWEN25_1_5B)
    assert policy_ is not None and small is not None and 1.5e9 < small.parameters < 1.6e9
    found = plan(Shapes(policy_, critic=small, reward=small), large(), 80 * GIB)
    gpus = {gpu.name: gpu for gpu in found.gpus}
    assert not found.problem and not found.unknown
    # Two bytes a parameter; and the critic's two ranks have half of weights and gradients each.
    assert gpus["reward model"].least == 2 * small.parameters and gpus["critic"].least == 2 * small.parameters
    offloaded = [(need.where, need.size) for need in found.nodes if need.what == "optimizer, offloaded"]
    assert offloaded == [
        ("process of the policy", 12 * policy_.parameters / 32),
        ("process of the critic", 12 * small.parameters / 2),
    ]
    # One as large as the policy does not fit.
    assert "a GPU of the reward model needs" in plan(Shapes(policy_, small, policy_), large(), 80 * GIB).problem


def test_a_critic_has_no_output_layer_and_its_own_optimizer() -> None:
    llama = model_shape(LLAMA_70B)
    assert llama is not None and llama.head == 128256 * 8192
    (critic,) = (gpu for gpu in plan(Shapes(llama, llama, llama), large()).gpus if gpu.name == "critic")
    assert {part.what: part.size for part in critic.parts}["weights"] == llama.parameters - llama.head
    layout = large("--actor.optim=muon")
    assert layout.optimizer_bytes("actor") == 8 and layout.optimizer_bytes("critic") == 12


def test_a_model_of_unknown_size_is_named_and_refuses_nothing() -> None:
    policy_ = model_shape(LLAMA_70B)
    assert policy_ is not None
    found = plan(Shapes(policy_), large(), 80 * GIB)
    assert not found.problem and found.unknown.startswith(
        "the memory plan leaves out the critic and the reward model: no config.json"
    )
    assert "reward model: not known, not counted" in as_text(found) and found.unknown in as_text(found)
    # What is known on a shared GPU is still held against it.
    together = large("--train.colocate_critic_reward", "--reward.num_gpus_per_node=2")
    shared = plan(Shapes(policy_, policy_), together, 80 * GIB)
    assert "a GPU of the critic + reward model needs" in shared.problem


def test_each_model_is_read_from_its_own_directory(tmp_path: Path) -> None:
    for name, config in (("policy", LLAMA_70B), ("critic", QWEN25_1_5B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    policy_, critic, reward = (str(tmp_path / name) for name in ("policy", "critic", "reward"))
    assert read_shapes(policy_, critic, reward) == Shapes(model_shape(LLAMA_70B), model_shape(QWEN25_1_5B))  # type: ignore[arg-type]
    assert read_shapes(policy_) == Shapes(model_shape(LLAMA_70B))  # type: ignore[arg-type]
    assert read_shapes(reward, critic) is None and read_shapes(None) is None
