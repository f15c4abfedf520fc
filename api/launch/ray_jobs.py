"""Ray's Jobs API, and nothing else of Ray: start a job, ask for it, stop it, read its log, forget it.

Invariants: every call ends within CALL_SECONDS a request; a call that gets no answer raises ClusterUnreachable and
says nothing about the job; a submission id is used once, so submitting the same attempt again starts nothing twice.
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

# Ray's dashboard answers in milliseconds; a busy head node takes seconds.
CALL_SECONDS = 10.0
# What a driver gets between SIGTERM and SIGKILL: it writes its last events and its summary.
STOP_WAIT_SECONDS = 30
LOG_LINES = 200
# The most that Ray's state API lists (RAY_MAX_LIMIT_FROM_API_SERVER).
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
    """The cluster did not answer, or not with an answer; what has become of the job is not known."""


class SubmitRefused(Exception):
    """The cluster says that this job cannot be started; the message is for people."""


class Launcher(Protocol):
    """What the dispatcher asks of a cluster. Everything but `address` may raise ClusterUnreachable."""

    def submit(self, attempt_uid: str, folder: Path) -> None:
        """Start the attempt whose file is in `folder`; nothing if it was already. Raises SubmitRefused."""

    def job(self, attempt_uid: str) -> Job:
        """What Ray says of it."""

    def stop(self, attempt_uid: str) -> None:
        """End it: SIGTERM, and SIGKILL after STOP_WAIT_SECONDS."""

    def log_tail(self, attempt_uid: str, lines: int = LOG_LINES) -> str:
        """The last lines its driver printed."""

    def delete(self, attempt_uid: str) -> None:
        """Have Ray forget an ended job."""

    def gpus(self) -> int:
        """GPUs of all nodes that are alive, pretended ones too."""

    def used_gpus(self) -> int:
        """GPUs that any job has or has reserved."""

    def state(self) -> ClusterState:
        """Nodes, resources and actors."""


class RayLauncher:
    """One cluster, by the address of its dashboard. `entrypoint` is the command of every job."""

    def __init__(self, address: str, token: str = "", entrypoint: str = ENTRYPOINT) -> None:
        """`address` as http://HOST:PORT; `token` of a cluster that wants one. Does not connect yet."""
        self.address = address.rstrip("/")
        self._token = token
        self._entrypoint = entrypoint
        self._client: Any = None

    def submit(self, attempt_uid: str, folder: Path) -> None:
        """See Launcher."""
        with self._answering() as client:
            try:
                client.submit_job(
                    entrypoint=self._entrypoint.format(attempt=attempt_uid),
                    submission_id=attempt_uid,
                    runtime_env={
                        "working_dir": str(folder),
                        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_SECONDS)},
                    },
                )
            except RuntimeError as error:  # what Ray's client raises for any status but 200
                if "already exists" in str(error):
                    return
                if "status code 400" in str(error):
                    raise SubmitRefused(_last_line(error)) from error
                raise  # 500: for example no agent is there yet to start it

    def job(self, attempt_uid: str) -> Job:
        """See Launcher."""
        with self._answering() as client:
            answer = client._do_request("GET", f"/api/jobs/{attempt_uid}")
            if answer.status_code == 404:
                return Job("missing")
            details = _json(answer)
        state = _STATES.get(str(details.get("status")))
        if state is None:
            raise ClusterUnreachable(f"Ray says the job is {details.get('status')!r}, which is no status")
        return Job(state, str(details.get("message") or ""), details.get("driver_exit_code"))

    def stop(self, attempt_uid: str) -> None:
        """See Launcher."""
        with self._answering() as client:
            answer = client._do_request("POST", f"/api/jobs/{attempt_uid}/stop")
            if answer.status_code not in (200, 404):
                raise ClusterUnreachable(_refusal(answer))

    def log_tail(self, attempt_uid: str, lines: int = LOG_LINES) -> str:
        """See Launcher."""
        with self._answering() as client:
            job = client._do_request("GET", f"/api/jobs/{attempt_uid}")
            node = job.json().get("driver_node_id") if job.status_code == 200 else None
            if node is None:  # its driver has not begun
                return ""
            # Not the Jobs API's own call, which sends the whole log.
            query = f"node_id={node}&filename=job-driver-{attempt_uid}.log&lines={lines}&timeout={int(CALL_SECONDS)}"
            answer = client._do_request("GET", f"/api/v0/logs/file?{query}")
            return str(answer.text) if answer.status_code == 200 else ""

    def delete(self, attempt_uid: str) -> None:
        """See Launcher."""
        with self._answering() as client:
            answer = client._do_request("DELETE", f"/api/jobs/{attempt_uid}")
            if answer.status_code not in (200, 404):
                raise ClusterUnreachable(_refusal(answer))

    def gpus(self) -> int:
        """See Launcher."""
        with self._answering() as client:
            nodes = _listed(client, "nodes")
        return int(sum(node["resources_total"].get("GPU", 0) for node in nodes if node["state"] == "ALIVE"))

    def used_gpus(self) -> int:
        """See Launcher."""
        with self._answering() as client:
            summary = _json(client._do_request("GET", "/nodes?view=summary"))
        nodes = summary["data"]["nodeLogicalResources"].values()
        return math.ceil(sum(taken_gpus(text) for text in nodes))

    def state(self) -> ClusterState:
        """See Launcher."""
        with self._answering() as client:
            status = _json(client._do_request("GET", "/api/cluster_status"))["data"].get("clusterStatus")
            return cluster_state(_listed(client, "nodes"), _listed(client, "actors"), status)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[Any]:
        """The client, with every way of not answering as ClusterUnreachable."""
        from ray.exceptions import RayError
        from requests.exceptions import RequestException

        try:
            if self._client is None:
                self._client = _connect(self.address, self._token)
            yield self._client
        except (RequestException, ConnectionError) as error:
            raise ClusterUnreachable(f"Ray does not answer at {self.address}") from error
        except RayError as error:  # wrong token
            raise ClusterUnreachable(f"Ray at {self.address} refuses: {_last_line(error)}") from error
        except RuntimeError as error:
            raise ClusterUnreachable(f"Ray at {self.address}: {_last_line(error)}") from error
        except (KeyError, TypeError) as error:
            raise ClusterUnreachable(f"Ray at {self.address} answers in a form that is not known: {error}") from error


def taken_gpus(text: str) -> float:
    """GPUs of a node that are used or reserved, from Ray's text about its resources (its HTTP API has no number).

    Its lines are as "2.0/8.0 GPU (1.0 used of 3.0 reserved in placement groups)": of what is reserved, the first
    number counts what is used only.
    """
    return sum(
        float(used) - float(inside or 0) + float(reserved or 0) for used, inside, reserved in _GPUS.findall(text)
    )


def _connect(address: str, token: str) -> Any:
    """Ray's own client, which waits no longer than CALL_SECONDS for an answer."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        # Ray's client would go there, whatever it is told.
        if os.environ.get(name):
            raise ClusterUnreachable(f"the environment variable {name} is set in the service: unset it")
    from ray.job_submission import JobSubmissionClient

    class BoundedClient(JobSubmissionClient):
        def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
            return super()._do_request(method, endpoint, timeout=CALL_SECONDS, **options)

    return BoundedClient(address, headers={"Authorization": f"Bearer {token}"} if token else None)


def _listed(client: Any, what: str) -> list[Mapping[str, Any]]:
    """Rows of Ray's state API, as many as it gives."""
    answer = _json(client._do_request("GET", f"/api/v0/{what}?detail=true&limit={LISTED}"))
    rows: list[Mapping[str, Any]] = answer["data"]["result"]["result"]
    return rows


def _json(answer: Any) -> Mapping[str, Any]:
    if answer.status_code != 200:
        raise ClusterUnreachable(_refusal(answer))
    content: Mapping[str, Any] = answer.json()
    return content


def _refusal(answer: Any) -> str:
    return f"Ray answered {answer.status_code}: {_last_line(answer.text)}"


def _last_line(said: object) -> str:
    return ([line.strip() for line in str(said).splitlines() if line.strip()] or ["no message"])[-1][:500]
