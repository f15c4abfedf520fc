"""A run's recorded settings, each option once as `group.name`. Pure.

A run directory's config.json has OpenRLHF's namespace (`arguments`, including ours) and our checked settings
(`settings`). A run that has not started has its spec alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Names and places of one run, so that two runs always differ in them.
_OWN = (
    "run.dir", "run.name", "ckpt.path", "ckpt.output_dir", "logger.tensorboard_dir", "logger.wandb.run_name",
    "history.spill_dir",
)  # fmt: skip
_OWN_GROUPS = ("control.",)


def is_own(key: str) -> bool:
    """Return True if `key` is a name or place that no two runs share."""
    return key in _OWN or key.startswith(_OWN_GROUPS)


def object_at(config: Any, *names: str) -> Mapping[str, Any]:
    """Return the object that these names lead to, empty if there is none or something else is there."""
    for name in names:
        config = config.get(name) if isinstance(config, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def recorded_settings(config: Mapping[str, Any], spec: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return every recorded setting by its key, without machine and versions."""
    found: dict[str, Any] = {}
    for name in ("arguments", "settings"):
        if part := object_at(config, name):
            found.update(flatten(part))
    if not found and spec is not None and spec.get("arguments"):
        found = flatten(spec["arguments"])
    return found


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration as dotted names; empty objects and lists are values."""
    if not isinstance(config, dict) or not config:
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat
