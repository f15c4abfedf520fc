"""Starting points of a new run: the options of the embedded demo and of the scripts in `examples/`.

The scripts in `examples/` say why each option is set; a test keeps both the same. Data and reward, which only the user
knows, are left out, and the form says that they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rhyme_openrlhf.api.launch.spec import Arguments
from rhyme_openrlhf.api.launch.spec_command import demo_argv, from_argv

# Folder below the start directory where `rhyme fetch-model smollm2` puts model, prompts and reward.
SMOLLM2_FOLDER = Path("models/smollm2-135m")


@dataclass(frozen=True)
class RunTemplate:
    """A starting point of a new run.

    `sentence`: its description; `needs`: what must exist before it can be started, or "".
    """

    name: str
    title: str
    sentence: str
    arguments: Arguments
    needs: str = ""


def _demo() -> RunTemplate:
    _, arguments = from_argv(demo_argv())
    return RunTemplate(
        "demo",
        "Embedded demo",
        "GRPO on the embedded model with 1 M parameters: a real run of a few minutes with nothing to download.",
        arguments,
    )


def _smollm2(folder: Path) -> RunTemplate:
    arguments: Arguments = {
        "actor": {
            "model_name_or_path": str(folder),
            "num_gpus_per_node": 1,
            "adam.lr": 5e-6,
            "lr_warmup_ratio": 0.0,
        },
        "reward": {"remote_url": str(folder / "reward.py")},
        "data": {
            "prompt_dataset": str(folder / "train.jsonl"),
            "input_key": "input",
            "label_key": "label",
            "apply_chat_template": True,
            "max_len": 128,
        },
        "rollout": {
            "max_new_tokens": 32,
            "temperature": 0.7,
            "batch_size": 16,
            "n_samples_per_prompt": 8,
            "micro_batch_size": 8,
        },
        "vllm": {"num_engines": 1, "gpu_memory_utilization": 0.4, "enforce_eager": True},
        "algo": {"advantage.estimator": "group_norm", "kl.init_coef": 0.0},
        "train": {"batch_size": 128, "micro_batch_size": 8, "num_episodes": 2},
        "cpu": {"kv_cache_mb": 1024},
    }
    return RunTemplate(
        "smollm2",
        "SmolLM2",
        "GRPO of SmolLM2-135M-Instruct on arithmetic: a small real model, on one GPU or on the CPU.",
        arguments,
        f"Fetch model and prompts first: rhyme fetch-model smollm2 --dir {folder}",
    )


_QWEN = "Qwen/Qwen3-8B"
_GRPO = RunTemplate(
    "grpo",
    "GRPO on a cluster",
    "Qwen3-8B on one node with 8 GPUs of 80 GB, which engines and trainer use in turns.",
    {
        "actor": {
            "model_name_or_path": _QWEN,
            "num_nodes": 1,
            "num_gpus_per_node": 8,
            "gradient_checkpointing_enable": True,
            "adam.lr": 1e-6,
        },
        "ref": {"num_nodes": 1, "num_gpus_per_node": 8},
        "vllm": {
            "num_engines": 8,
            "tensor_parallel_size": 1,
            "enable_sleep": True,
            "gpu_memory_utilization": 0.6,
            "enable_prefix_caching": True,
        },
        "train": {
            "colocate_all": True,
            "dynamic_batch_enable": True,
            "max_tokens_per_gpu": 16384,
            "num_episodes": 10,
            "batch_size": 1024,
        },
        "ds": {"enable_sleep": True, "zero_stage": 3, "adam_offload": True, "packing_samples": True},
        "rollout": {
            "max_tokens_per_gpu": 32768,
            "max_new_tokens": 8192,
            "batch_size": 128,
            "n_samples_per_prompt": 8,
            "temperature": 1.0,
        },
        "data": {"input_key": "input", "label_key": "label", "apply_chat_template": True, "max_len": 9216},
        "algo": {
            "advantage.estimator": "group_norm",
            "kl.init_coef": 1e-3,
            "kl.use_loss": True,
            "kl.estimator": "k3",
            "advantage.is_correction_level": "token",
            "advantage.is_correction_mode": "clip",
            "advantage.is_correction_threshold": [0.5, 2.0],
        },
        "histospec": {"enable": True, "window_max": 32},
        "history": {"workers": 1},
        "ckpt": {"save_steps": 50, "max_num": 2, "save_hf": True},
    },
    "Choose a data set and a reward.",
)
_PPO = RunTemplate(
    "ppo",
    "PPO with a critic",
    "Qwen3-8B with a reward model and a critic on two nodes with 8 GPUs of 80 GB each.",
    {
        "actor": {
            "model_name_or_path": _QWEN,
            "num_nodes": 1,
            "num_gpus_per_node": 4,
            "gradient_checkpointing_enable": True,
            "adam.lr": 5e-7,
        },
        "ref": {"num_nodes": 1, "num_gpus_per_node": 4},
        "critic": {"num_nodes": 1, "num_gpus_per_node": 4, "adam.lr": 9e-6, "freezing_steps": 10},
        "reward": {"num_nodes": 1, "num_gpus_per_node": 4, "normalize_enable": True},
        "train": {
            "colocate_actor_ref": True,
            "colocate_critic_reward": True,
            "micro_batch_size": 2,
            "num_episodes": 3,
            "batch_size": 128,
        },
        "vllm": {
            "num_engines": 4,
            "tensor_parallel_size": 2,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": True,
        },
        "ds": {"zero_stage": 3, "adam_offload": True, "packing_samples": True},
        "rollout": {"micro_batch_size": 4, "max_new_tokens": 2048, "batch_size": 1024, "n_samples_per_prompt": 1},
        "data": {"input_key": "input", "apply_chat_template": True, "max_len": 4096},
        "algo": {
            "advantage.estimator": "gae",
            "advantage.gamma": 1.0,
            "advantage.lambd": 0.95,
            "kl.init_coef": 0.01,
        },
        "histospec": {"enable": True},
        "history": {"workers": 2},
        "ckpt": {"save_steps": 50, "max_num": 2},
    },
    "Choose a data set and a reward model.",
)
_ASYNC = RunTemplate(
    "async",
    "Asynchronous",
    "Qwen3-8B on 8 GPUs of 80 GB: 4 generate while 4 train, and new weights reach engines in the middle of responses.",
    {
        "actor": {
            "model_name_or_path": _QWEN,
            "num_nodes": 1,
            "num_gpus_per_node": 4,
            "gradient_checkpointing_enable": True,
            "adam.lr": 1e-6,
        },
        "algo": {
            "kl.init_coef": 0.0,
            "advantage.estimator": "group_norm",
            "advantage.is_correction_level": "token",
            "advantage.is_correction_mode": "mask",
            "advantage.is_correction_threshold": [0.5, 5.0],
        },
        "vllm": {
            "num_engines": 4,
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.9,
            "enable_prefix_caching": True,
        },
        "train": {
            "async_enable": True,
            "async_queue_size": 1,
            "partial_rollout_enable": True,
            "dynamic_batch_enable": True,
            "max_tokens_per_gpu": 16384,
            "num_episodes": 10,
            "batch_size": 1024,
        },
        "ds": {"zero_stage": 3, "adam_offload": True, "packing_samples": True},
        "rollout": {
            "max_tokens_per_gpu": 32768,
            "max_new_tokens": 8192,
            "batch_size": 128,
            "vllm_generate_batch_size": 192,
            "n_samples_per_prompt": 8,
        },
        "data": {"input_key": "input", "label_key": "label", "apply_chat_template": True, "max_len": 9216},
        "histospec": {"enable": True},
        "history": {"workers": 1},
        "ckpt": {"save_steps": 50, "max_num": 2},
    },
    "Choose a data set and a reward.",
)


def templates(roots: Sequence[Path]) -> dict[str, RunTemplate]:
    """Return every template by name. `roots`: folders that runs may read; SmolLM2 is searched below each."""
    places = [root / SMOLLM2_FOLDER for root in roots]
    folder = next((place for place in places if place.is_dir()), places[0])
    found = (_demo(), _smollm2(folder), _GRPO, _PPO, _ASYNC)
    return {template.name: template for template in found}
