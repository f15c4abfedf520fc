"""The variables that a run hands to Ray's job: what is forwarded, and what a submitted job keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rhyme_openrlhf.platform.job_variables import JOB_CONFIG, job_variables, withdraw

DEFAULTS = {"NCCL_DEBUG": "WARN", "TOKENIZERS_PARALLELISM": "true"}


def submitted(**variables: str) -> dict[str, str]:
    """The environment of a driver that `ray job submit` started with these variables."""
    return {JOB_CONFIG: json.dumps({"runtime_env": {"env_vars": variables}, "metadata": {}}), **variables}


@pytest.mark.parametrize("value", ["WARN", "INFO"])
def test_a_variable_of_the_job_is_not_given_again(value: str) -> None:
    environment = submitted(NCCL_DEBUG=value, HF_HOME="/models", MINE="1")
    found = job_variables(DEFAULTS, environment)
    assert found == {"TOKENIZERS_PARALLELISM": "true"}
    runtime_env: Any = pytest.importorskip("ray.runtime_env.runtime_env")
    job = json.loads(environment[JOB_CONFIG])["runtime_env"]
    merged = runtime_env._merge_runtime_env(job, {"env_vars": found})
    assert merged["env_vars"] == {"NCCL_DEBUG": value, "HF_HOME": "/models", "MINE": "1", **found}
    # Ray refuses what the run gave before.
    assert runtime_env._merge_runtime_env(job, {"env_vars": {"NCCL_DEBUG": value}}) is None


def test_rays_name_of_the_variable_is_the_one_read_here() -> None:
    constants: Any = pytest.importorskip("ray._private.runtime_env.constants")
    assert constants.RAY_JOB_CONFIG_JSON_ENV_VAR == JOB_CONFIG


@pytest.mark.parametrize("config", ["", "{}", '{"runtime_env": null}', '{"runtime_env": {"working_dir": "."}}'])
def test_the_drivers_values_go_to_all_nodes(config: str) -> None:
    environment = {
        JOB_CONFIG: config, "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0",
        "HF_HOME": "/models", "HF_HUB_OFFLINE": "1", "VLLM_ATTENTION_BACKEND": "FLASHINFER",
        "PATH": "/bin", "HOME": "/root",
    }  # fmt: skip
    assert job_variables(DEFAULTS, environment) == {
        name: value for name, value in environment.items() if name.startswith(("NCCL", "GLOO", "HF", "VLLM"))
    } | {"TOKENIZERS_PARALLELISM": "true"}


def test_neither_secrets_nor_what_belongs_to_one_node_is_forwarded() -> None:
    environment = {"HF_TOKEN": "secret", "VLLM_API_KEY": "secret", "VLLM_HOST_IP": "10.0.0.7"}
    environment["HF_ENDPOINT"] = "https://me:secret@mirror"
    assert job_variables({}, environment) == {}


def test_a_variable_that_is_withdrawn_reaches_no_process_of_the_job() -> None:
    environment = submitted(RHYME_CONTROL_TOKEN="secret", MINE="1")
    assert withdraw("RHYME_CONTROL_TOKEN", environment) == "secret"
    assert "secret" not in str(environment) and job_variables({"MINE": "2"}, environment) == {}
    assert withdraw("RHYME_CONTROL_TOKEN", environment) == ""
    assert withdraw("MINE", alone := {"MINE": "1"}) == "1" and alone == {}
