"""Kinds of OpenRLHF's text options, by flag: its parser says only that they are texts.

Invariant: the table has every option of OpenRLHF `CHECKED_AGAINST` that takes any text, and no other one.
`tests/settings/test_upstream_kinds.py` compares it with `settings/upstream_options.json`. So an option that a later
OpenRLHF brings has to be put here before it can be used.
"""

from __future__ import annotations

from rhyme_openrlhf.settings.options import TextKind

CHECKED_AGAINST = "0.11.2"

UPSTREAM_KINDS: dict[str, TextKind] = {
    "--actor.model_name_or_path": "model",
    "--critic.model_name_or_path": "model",
    "--reward.model_name_or_path": "model",
    "--reward.remote_url": "reward",
    "--train.agent_func_path": "agent",
    "--data.prompt_dataset": "data",
    "--eval.dataset": "data",
    "--ckpt.path": "output",
    "--ckpt.output_dir": "output",
    "--logger.tensorboard_dir": "output",
    "--logger.wandb.key": "secret",
    "--logger.wandb.org": "plain",
    "--logger.wandb.group": "plain",
    "--logger.wandb.project": "plain",
    "--logger.wandb.run_name": "plain",
    "--actor.lr_scheduler": "plain",
    "--critic.lr_scheduler": "plain",
    "--vllm.sync_backend": "plain",
    "--eval.split": "plain",
    "--ckpt.best_metric_key": "plain",
    # It also takes a kernel repository of the hub; api/launch/schema.py leaves the names that run no foreign code.
    "--ds.attn_implementation": "plain",
    "--ds.grad_accum_dtype": "plain",
    "--ds.lora.target_modules": "plain",
    "--ds.value_head_prefix": "plain",
    "--data.prompt_probs": "plain",
    "--data.prompt_split": "plain",
    "--data.input_key": "plain",
    "--data.label_key": "plain",
    "--data.input_template": "plain",
    "--data.image_key": "plain",
}
