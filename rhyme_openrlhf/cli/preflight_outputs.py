"""Checks that a run can write where it is told to, and that its disks have room for checkpoints and model.

Sizes are at least those that will be written: weights and optimizer states of the models whose shape is known. A quota
is smaller than the free space that a file system tells, and no call asks every file system for it. On a cluster
(RAY_ADDRESS) another node may write, so nothing is said about space there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

from rhyme_openrlhf.cli.preflight_models import PreflightError
from rhyme_openrlhf.run import model_shape
from rhyme_openrlhf.run.model_shape import WEIGHT_BYTES, Shapes
from rhyme_openrlhf.run.resources import layout_of, memory

FP32 = "fp32"


def check_outputs(args: SimpleNamespace) -> str:
    """Raise PreflightError where a run's directory, its checkpoints, its model or its logs cannot be written.

    Return a sentence where the disk has room for a checkpoint, but not for as many as are kept; else "".
    """
    for flag, path in (
        ("--run.dir", args.run.dir),
        ("--ckpt.path", args.ckpt.path),
        ("--ckpt.output_dir", args.ckpt.output_dir),
        ("--logger.tensorboard_dir", args.logger.tensorboard_dir),
    ):
        if path:
            _check_directory(flag, Path(path))
    shapes = None if os.environ.get("RAY_ADDRESS") else model_shape.shapes_of(args)
    return "" if shapes is None else _check_space(args, shapes)


def _check_directory(flag: str, path: Path) -> None:
    """Try to write a file into the directory, or where it would be made."""
    try:
        there = _existing(path)
        if not there.is_dir():
            raise PreflightError(f"{flag}: {there} is not a directory")
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"\0")
            file.flush()
    except OSError as error:
        raise PreflightError(f"{flag}: {path} cannot be written ({error.strerror or error})") from error


def _check_space(args: SimpleNamespace, shapes: Shapes) -> str:
    """Raise PreflightError where not even one checkpoint, or the trained model, fits; return a sentence as above."""
    # With LoRA the trained model is an adapter.
    trained = 0 if args.ds.lora.rank else WEIGHT_BYTES * shapes.policy.parameters
    _require("--ckpt.output_dir", "the trained model takes", trained, _room(args.ckpt.output_dir, ""))
    if args.ckpt.disable_ds or args.ckpt.save_steps < 0:
        return ""
    one, room = checkpoint_bytes(args, shapes), _room(args.ckpt.path, "_actor", "_critic")
    _require("--ckpt.path", "a checkpoint takes", one, room)
    # OpenRLHF deletes down to --ckpt.max_mem (GiB) before it writes the next one.
    kept = min(args.ckpt.max_num, 1 + args.ckpt.max_mem * 2**30 // one)
    if kept * one <= room:
        return ""
    return (
        f"--ckpt.max_num {args.ckpt.max_num}: {kept:g} checkpoints of at least {memory(one)} do not fit into "
        f"{args.ckpt.path}, which has {memory(room)}, and the run will fail there: lower it, or free space"
    )


def checkpoint_bytes(args: SimpleNamespace, shapes: Shapes) -> float:
    """Return the least size of one checkpoint: weights and optimizer states of policy and critic, as DeepSpeed saves.

    Counted of the embedded model: 16.0 bytes a parameter in fp32 (checked against DeepSpeed 0.19.6).
    """
    layout = layout_of(args)
    weight = layout.weight_bytes * (2 if args.ds.param_dtype == FP32 else 1)
    return sum(
        (weight + layout.optimizer_bytes(name) * layout.trained) * (shape.parameters - lacks)
        for name, shape, lacks in (
            ("actor", shapes.policy, 0),
            # Its value head is one row in place of the output layer.
            ("critic", shapes.critic, shapes.critic.head if shapes.critic else 0),
        )
        if shape is not None
    )


def _require(flag: str, what: str, size: float, room: float) -> None:
    if size > room:
        raise PreflightError(
            f"{flag}: {what} at least {memory(size)}, but there is room for {memory(room)}: free space, or name a "
            "directory on another disk"
        )


def _room(directory: str, *replaced: str) -> int:
    """Return the bytes that are free for a directory, or are those of its folders that are `replaced`."""
    path, size = Path(directory), 0
    for folder in replaced:
        for file in (path / folder).rglob("*"):
            # Another run may be deleting it.
            with suppress(OSError):
                size += file.lstat().st_size
    return shutil.disk_usage(_existing(path)).free + size


def _existing(path: Path) -> Path:
    """Return the directory, or the one above it that exists already."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    return there
