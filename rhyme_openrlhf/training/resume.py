"""The driver's part of --ckpt.load_enable, before anything is started.

It picks the newest checkpoint that is complete, refuses settings that contradict it, and points OpenRLHF at it.
Invariants: after `prepare`, every half-written checkpoint is gone and OpenRLHF loads exactly the one that the Note
names, or none.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rhyme_openrlhf.telemetry.services import Checkpoints, ResumePoint
from rhyme_openrlhf.training.checkpoint_directory import (
    CRITIC,
    LATEST,
    LATEST_UNIVERSAL,
    POLICY,
    TAG,
    CheckpointDirectory,
    Tag,
)

STATE_FILE = "state.json"
STATE_VERSION = 2
# Upstream deletes down to --ckpt.max_num less one before it writes the next; with 1, a kill then leaves none.
SAFE_MAX_NUM = 2
# What a checkpoint is bound to, beside the model and the number of its ranks: data order, buffers and optimizer
# states have no meaning under another value.
BOUND = (
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "train.batch_size",
    "actor.optim",
    "ds.zero_stage",
    "ds.param_dtype",
    "ds.tensor_parallel_size",
    "ds.ring_attn_size",
    "ds.lora.rank",
)


class ResumeError(Exception):
    """The run cannot go on from its checkpoint; the message is one sentence for the user."""


def prepare(args: SimpleNamespace, prompts: int) -> tuple[Checkpoints, list[str]]:
    """Choose what to resume from and set `args` accordingly; also returns what the user is to be told.

    Raises ResumeError, and then nothing of the checkpoints has been changed but what a kill had left undone.
    """
    settings = bound_settings(args, prompts)
    notes = []
    if args.ckpt.max_num < SAFE_MAX_NUM and not args.ckpt.disable_ds:
        args.ckpt.max_num = SAFE_MAX_NUM
        notes.append(f"--ckpt.max_num is {SAFE_MAX_NUM}: the last checkpoint stays until the next one is complete")
    if not args.ckpt.load_enable:
        return Checkpoints(None, settings), notes
    try:
        point, note = _choose(args, settings)
    except OSError as error:
        raise ResumeError(f"--ckpt.path {args.ckpt.path} cannot be used: {error}") from error
    # Upstream would look for states in an `_actor` without a checkpoint, and fail.
    args.ckpt.load_enable = point is not None
    if point is not None and args.train.enable_ema:
        note += "; the moving average (--train.enable_ema) is in no checkpoint and starts again from the given model"
    return Checkpoints(point, settings), [*notes, note]


def _choose(args: SimpleNamespace, settings: dict[str, Any]) -> tuple[ResumePoint | None, str]:
    path = Path(args.ckpt.path).absolute()
    directory = CheckpointDirectory(path, critic=bool(args.critic.model_name_or_path))
    directory.tidy()
    universal = bool(args.ds.use_universal_ckpt)
    _refuse_unknown(directory, universal)
    tag = directory.newest_universal() if universal else directory.newest()
    if tag is None:
        removed = directory.remove_incomplete()
        return None, f"no complete checkpoint in {path}: training starts at the beginning{_deleted(removed)}"
    if not tag.complete:
        critics = directory.universal(CRITIC) if universal else directory.latest(CRITIC)
        if args.critic.model_name_or_path and critics != tag.name:
            raise ResumeError(
                f"--ckpt.load_enable: {path} has checkpoint {tag.name} of the policy, but not of the critic: resume "
                "without --critic.model_name_or_path, or choose another --ckpt.path to start anew"
            )
        note = (
            f"resumes from OpenRLHF's own checkpoint {tag.name} in {path}: history, random states, the KL coefficient "
            "and the counts of the seeds start fresh"
        )
        return ResumePoint(tag.name, tag.step, None, ()), note
    point = _point(directory, tag, settings)
    removed = directory.use(tag)
    return point, f"resumes from checkpoint {tag.name} in {path}, after step {point.step}{_deleted(removed)}"


def _refuse_unknown(directory: CheckpointDirectory, universal: bool) -> None:
    """Raise ResumeError where the policy has checkpoints, but not one that can be told to be the one to load.

    To start at step 0 there would lose them: saves that follow delete the oldest.
    """
    policy = directory.path / POLICY
    if universal:
        if policy.is_dir() and directory.universal(POLICY) is None:
            raise ResumeError(
                f"--ds.use_universal_ckpt: {policy / LATEST_UNIVERSAL} names no checkpoint there: convert one with "
                f"DeepSpeed's ds_to_universal (--inject_missing_state), or choose another --ckpt.path to start anew"
            )
        return
    name = directory.named(POLICY, LATEST)
    is_another = bool(name) and (policy / str(name)).is_dir()
    # A name torn by a kill is nobody's checkpoint: then the newest complete save is taken, if there is one.
    if name is not None and not TAG.fullmatch(name) and (is_another or directory.newest() is None):
        raise ResumeError(
            f"--ckpt.load_enable: {policy / LATEST} names '{name[:80]}', which is no checkpoint of OpenRLHF's "
            f"(global_step<n>): write the name of the one to load into it, or choose another --ckpt.path to start anew"
        )
    strangers = directory.strangers()
    if strangers and directory.newest() is None:
        raise ResumeError(
            f"--ckpt.load_enable: {policy} has {', '.join(strangers[:3])}, but {LATEST} there names none that exists: "
            "write the name of the one to load into it, or choose another --ckpt.path to start anew"
        )


def _point(directory: CheckpointDirectory, tag: Tag, settings: dict[str, Any]) -> ResumePoint:
    ours = directory.ours(tag.name)
    state = json.loads((ours / STATE_FILE).read_text())
    if state["version"] != STATE_VERSION:
        raise ResumeError(
            f"--ckpt.load_enable: checkpoint {tag.name} in {directory.path} was written by another version of "
            f"rhyme-openrlhf (its format is {state['version']}, this one reads {STATE_VERSION}): resume with that one"
        )
    different = contradictions(state["settings"], settings)
    if different:
        raise ResumeError(
            f"--ckpt.load_enable: checkpoint {tag.name} in {directory.path} was made with {'; '.join(different)}: "
            "give the same values, or choose another --ckpt.path to start anew"
        )
    files = tuple(ours / name for name in state["history"])
    return ResumePoint(tag.name, state["step"], ours, files, state.get("drafted_from"))


def _deleted(removed: list[str]) -> str:
    return f" (deleted what was half-written: {', '.join(removed)})" if removed else ""


def bound_settings(args: SimpleNamespace, prompts: int) -> dict[str, Any]:
    """Return what a checkpoint of this run is bound to, by the flag that sets it."""
    values = {f"--{name}": _value(args, name) for name in BOUND}
    values["--actor.model_name_or_path"] = _model(args.actor.model_name_or_path)
    values["--critic.model_name_or_path"] = _model(args.critic.model_name_or_path)
    values["--actor.num_nodes x --actor.num_gpus_per_node"] = args.actor.num_nodes * args.actor.num_gpus_per_node
    critic = args.critic.num_nodes * args.critic.num_gpus_per_node if args.critic.model_name_or_path else 0
    values["--critic.num_nodes x --critic.num_gpus_per_node"] = critic
    values["prompts in --data.prompt_dataset:"] = prompts
    return values


def contradictions(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs between a checkpoint's settings and the run's, as clauses that name both values."""
    return [
        f"{name} {_shown(value)}, this run has {_shown(now[name])}"
        for name, value in saved.items()
        if name in now and not _same(value, now[name])
    ]


def _value(args: SimpleNamespace, name: str) -> Any:
    value: Any = args
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _model(name: str | None) -> dict[str, str] | None:
    """Return a model's name and, for a directory, a hash of its config.json: the directory may move."""
    if not name:
        return None
    config = Path(name) / "config.json"
    digest = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    return {"name": os.path.abspath(name) if digest else name, "config": digest}


def _same(saved: Any, now: Any) -> bool:
    if isinstance(saved, dict) and isinstance(now, dict) and saved["config"] and now["config"]:
        return bool(saved["config"] == now["config"])
    return bool(saved == now)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return str(value["name"])
    return "none" if value is None else str(value)
