"""Environment variables that a run gives all of its processes, on every node.

A worker of Ray has the environment of the `ray start` on its node, not the driver's. So the driver's variables of the
libraries that the nodes share (FORWARDED) go with Ray's job.

Invariants:
- A variable that Ray's job sets itself (`ray job submit --runtime-env-json`) is left out: Ray refuses a second value,
  even an equal one. The driver has the job's value, and so has every process of the job.
- No secret goes along, also none in an address, because Ray's dashboard shows the job's variables. `withdraw` takes one
  that the driver alone needs out of the job, before Ray gets it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

from rhyme_openrlhf.settings.redaction import is_secret

FORWARDED = ("NCCL_", "GLOO_", "HF_", "VLLM_")
# The address of one node.
OWN = frozenset({"VLLM_HOST_IP"})
# By this variable Ray 2.55 tells a job's driver what the job was submitted with.
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def job_variables(defaults: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Ray's job: those to forward, and `defaults` where `environment` has no other value."""
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) and name not in OWN and not is_secret(name) and "@" not in value
    }
    found |= {name: environment.get(name, value) for name, value in defaults.items()}
    submitted = _submitted(json.loads(environment.get(JOB_CONFIG) or "{}"))
    return {name: value for name, value in found.items() if name not in submitted}


def withdraw(name: str, environment: MutableMapping[str, str]) -> str:
    """Return the variable `name`, "" without one, and take it out of the driver's environment and of its job's."""
    config = json.loads(environment.get(JOB_CONFIG) or "{}")
    if _submitted(config).pop(name, None) is not None:
        environment[JOB_CONFIG] = json.dumps(config)
    return environment.pop(name, "")


def has_working_directory(environment: Mapping[str, str]) -> bool:
    """Return whether this process is the driver of a job for which Ray has copied a working directory to the nodes."""
    config = json.loads(environment.get(JOB_CONFIG) or "{}")
    return bool((config.get("runtime_env") or {}).get("working_dir"))


def _submitted(config: dict[str, Any]) -> dict[str, str]:
    """Return the variables in a job's configuration."""
    return (config.get("runtime_env") or {}).get("env_vars") or {}
