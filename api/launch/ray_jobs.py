"""Access to Ray's Jobs API: submit a job, query it, stop it, read its log, delete it.

Invariants:

- A request takes at most CALL_SECONDS.
- A call without a response raises ClusterUnreachable, which says nothing about the job.
- A submission id is used once, so submitting the same attempt again starts nothing.

This is the only module of the service that imports ray, and only when it is used.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from rhyme_openrlhf.api.launch.cluster_state import ClusterState, cluster_state
from rhyme_openrlhf.api.launch.job_file import ENTRYPOINT
from rhyme_openrlhf.api.launch.queueing import Job, JobState
from rhyme_openrlhf.telemetry.run_directory import TOKEN_VARIABLE

# Ray's dashboard responds in milliseconds; a busy head node takes seconds.
CALL_SECONDS = 10.0
# Seconds between SIGTERM and SIGKILL, in which a driver writes its last events and its summary.
STOP_WAIT_SECONDS = 30
LOG_LINES = 200
# Most rows that Ray's state API lists (RAY_MAX_LIMIT_FROM_API_SERVER).
LISTED = 10_000

_GPUS = re.compile(
    r"^\s*([\d.]+)/[\d.]+ GPU(?: \(([\d.]+) used of ([\d.]+) reserved in placement groups\))?\s*$", re.MULTILINE
)
_STATES: dict[str, JobState] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "stopped",
}


class ClusterUnreachable(Exception):
    """The cluster did not respond, or not correctly; the state of the job is unknown."""


class SubmitRefused(Exception):
    """The cluster cannot start this job; the message is for people."""


class Launcher(Protocol):
    """The dispatcher's interface to a cluster. Everything but `address` may raise ClusterUnreachable."""

    def submit(self, attempt_uid: str, folder: Path, token: str) -> None:
        """Start the attempt whose file is in `folder`, unless it was started before. Raises SubmitRefused.

        `token` is its reporter's.
        """

    def job(self, attempt_uid: str) -> Job:
        """Return Ray's report on the job."""

    def stop(self, attempt_uid: str) -> None:
        """End the job: SIGTERM, and SIGKILL after STOP_WAIT_SECONDS."""

    def log_tail(self, attempt_uid: str) -> str:
        """Return the last LOG_LINES lines that the job's driver printed."""

    def delete(self, attempt_uid: str) -> None:
        """Delete an ended job in Ray."""

    def gpus(self) -> int:
        """Return the GPUs of all nodes that are alive, including simulated ones."""

    def used_gpus(self) -> int:
        """Return the GPUs that any job uses or has reserved."""

    def state(self) -> ClusterState:
        """Return nodes, resources and actors."""


class RayLauncher:
    """The launcher of one cluster, identified by its dashboard's address. `entrypoint`: the command of every job."""

    def __init__(self, address: str, token: str = "", entrypoint: str = ENTRYPOINT) -> None:
        """Set the `address` as http://HOST:PORT, and the `token` if the cluster requires one; does not connect yet."""
        self.address = address.rstrip("/")
        self._token = token
        self._entrypoint = entrypoint
        self._client: Any = None

    def submit(self, attempt_uid: str, folder: Path, token: str) -> None:
        """Start the attempt (see Launcher). Ray shows the token to its users, who can run anything as its user."""
        with self._answering() as client:
            try:
                client.submit_job(
                    entrypoint=self._entrypoint.format(attempt=attempt_uid),
                    submission_id=attempt_uid,
                    runtime_env={
                        "working_dir": str(folder),
                        "env_vars": {
                            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS),
                            TOKEN_VARIABLE: token,
                        },
                    },
                )
            except RuntimeError as error:  # raised by Ray's client for every status but 200
                if "already exists" in str(error):
                    return
                if "status code 400" in str(error):
                    raise SubmitRefused(_last_line(error)) from error
                raise  # 500: for example, no agent is ready to start it

    def job(self, attempt_uid: str) -> Job:
        """Return Ray's report (see Launcher)."""
        with self._answering() as client:
            answer = client._do_request("GET", f"/api/jobs/{attempt_uid}")
            if answer.status_code == 404:
                return Job("missing")
            details = _json(answer)
        state = _STATES.get(str(details.get("status")))
        if state is None:
            raise ClusterUnreachable(f"Ray reports the unknown job status {details.get('status')!r}")
        return Job(state, str(details.get("message") or ""), details.get("driver_exit_code"))

    def stop(self, attempt_uid: str) -> None:
        """End the job (see Launcher)."""
        with self._answering() as client:
            answer = client._do_request("POST", f"/api/jobs/{attempt_uid}/stop")
            if answer.status_code not in (200, 404):
                raise ClusterUnreachable(_refusal(answer))

    def log_tail(self, attempt_uid: str) -> str:
        """Return the last lines of output (see Launcher)."""
        with self._answering() as client:
            job = client._do_request("GET", f"/api/jobs/{attempt_uid}")
            node = job.json().get("driver_node_id") if job.status_code == 200 else None
            if node is None:  # its driver has not started
                return ""
            # The Jobs API's own call would send the whole log.
            query = (
                f"node_id={node}&filename=job-driver-{attempt_uid}.log&lines={LOG_LINES}&timeout={int(CALL_SECONDS)}"
            )
            answer = client._do_request("GET", f"/api/v0/logs/file?{query}")
            return str(answer.text) if answer.status_code == 200 else ""

    def delete(self, attempt_uid: str) -> None:
        """Delete the job (see Launcher)."""
        with self._answering() as client:
            answer = client._do_request("DELETE", f"/api/jobs/{attempt_uid}")
            if answer.status_code not in (200, 404):
                raise ClusterUnreachable(_refusal(answer))

    def gpus(self) -> int:
        """Return the cluster's GPUs (see Launcher)."""
        with self._answering() as client:
            nodes = _listed(client, "nodes")
        return int(sum(node["resources_total"].get("GPU", 0) for node in nodes if node["state"] == "ALIVE"))

    def used_gpus(self) -> int:
        """Return the used GPUs (see Launcher)."""
        with self._answering() as client:
            summary = _json(client._do_request("GET", "/nodes?view=summary"))
        nodes = summary["data"]["nodeLogicalResources"].values()
        return math.ceil(sum(taken_gpus(text) for text in nodes))

    def state(self) -> ClusterState:
        """Return the cluster's state (see Launcher)."""
        with self._answering() as client:
            status = _json(client._do_request("GET", "/api/cluster_status"))["data"].get("clusterStatus")
            return cluster_state(_listed(client, "nodes"), _listed(client, "actors"), status)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[Any]:
        """Yield the client, and convert every failure to respond to ClusterUnreachable."""
        from ray.exceptions import RayError
        from requests.exceptions import RequestException

        try:
            if self._client is None:
                self._client = _connect(self.address, self._token)
            yield self._client
        except (RequestException, ConnectionError) as error:
            raise ClusterUnreachable(f"Ray does not respond at {self.address}") from error
        except RayError as error:  # wrong token
            raise ClusterUnreachable(f"Ray at {self.address} refuses: {_last_line(error)}") from error
        except RuntimeError as error:
            raise ClusterUnreachable(f"Ray at {self.address}: {_last_line(error)}") from error
        except (KeyError, TypeError) as error:
            raise ClusterUnreachable(f"Ray at {self.address} responds in an unknown form: {error}") from error


def taken_gpus(text: str) -> float:
    """Return a node's used or reserved GPUs from Ray's text about its resources; its HTTP API has no number.

    The text has lines as "2.0/8.0 GPU (1.0 used of 3.0 reserved in placement groups)". Of reserved GPUs, the first
    number counts only the used ones.
    """
    return sum(
        float(used) - float(inside or 0) + float(reserved or 0) for used, inside, reserved in _GPUS.findall(text)
    )


def _connect(address: str, token: str) -> Any:
    """Return Ray's own client, which waits at most CALL_SECONDS for a response."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        # Ray's client would prefer this address to the given one.
        if os.environ.get(name):
            raise ClusterUnreachable(f"the environment variable {name} is set for the service: unset it")
    from ray.job_submission import JobSubmissionClient

    class BoundedClient(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=CALL_SECONDS, **options)

    return BoundedClient(address, headers={"Authorization": f"Bearer {token}"} if token else None)


def _listed(client: Any, what: str) -> list[Mapping[str, Any]]:
    """Return rows of Ray's state API, at most LISTED."""
    answer = _json(client._do_request("GET", f"/api/v0/{what}?detail=true&limit={LISTED}"))
    rows: list[Mapping[str, Any]] = answer["data"]["result"]["result"]
    return rows


def _json(answer: Any) -> Mapping[str, Any]:
    if answer.status_code != 200:
        raise ClusterUnreachable(_refusal(answer))
    content: Mapping[str, Any] = answer.json()
    return content


def _refusal(answer: Any) -> str:
    return f"Ray responded with status {answer.status_code}: {_last_line(answer.text)}"


def _last_line(said: object) -> str:
    return ([line.strip() for line in str(said).splitlines() if line.strip()] or ["no message"])[-1][:500]
