"""The control plane as it is installed where nothing of the training stack is: the environment of
`scripts/test.sh --server`, which has the `server` extra alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(bool(importlib.util.find_spec("torch")), reason="scripts/test.sh --server runs it"),
]

RECORDED = Path(__file__).parent / "data" / "recorded_run.jsonl"
PROGRAMS = Path(sys.executable).parent


def clean() -> dict[str, str]:
    """This process's environment without what would lend the new one its packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {name: value for name, value in kept.items() if not name.startswith("RAY_")} | {"PYTHONUNBUFFERED": "1"}


def test_the_server_extra_serves(tmp_path: Path, starts_ray: None, starts_service: None) -> None:
    missing = (
        "import importlib.util as u; print([n for n in ('torch', 'vllm', 'deepspeed', 'openrlhf') if u.find_spec(n)])"
    )
    shown = subprocess.run(
        [str(PROGRAMS / "python"), "-c", missing], capture_output=True, text=True, env=clean(), cwd=tmp_path
    )
    assert shown.stdout == "[]\n", shown.stdout + shown.stderr

    run = tmp_path / "runs" / "recorded"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_bytes(RECORDED.read_bytes())
    (run / "config.json").write_text(json.dumps({"command": ["rhyme", "demo"], "settings": {"run": {"name": "demo"}}}))
    # As a user would: with a Ray of its own on this machine.
    command = [str(PROGRAMS / "rhyme"), "serve", "--local", "--serve.port=0"]
    command += [f"--serve.data_dir={tmp_path / 'data'}", f"--serve.roots={tmp_path / 'runs'}"]
    service = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean(), cwd=tmp_path
    )
    try:
        assert service.stdout is not None
        said = ""
        while not (link := re.search(r"(http://\S+)/#code=(\S+)", said)):
            line = service.stdout.readline()
            assert line, f"the service ended: {said}"
            said += line
        url, code = link[1], link[2]
        with httpx.Client(base_url=url, timeout=60) as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/api/v1/runs").status_code == 401
            issued = client.post("/api/v1/tokens/exchange", json={"code": code, "name": "test"}).json()
            client.headers["Authorization"] = f"Bearer {issued['token']}"
            assert client.get("/api/v1/runs").json()["items"] == []
            imported = client.post("/api/v1/imports", json={"directory": str(run)})
            assert imported.status_code == 200, imported.text
            assert imported.json()["accepted"] == len(RECORDED.read_text().splitlines())
            (shown_run,) = client.get("/api/v1/runs").json()["items"]
            assert (shown_run["name"], shown_run["status"], shown_run["step"]) == ("demo", "succeeded", 10)
            assert len(client.get(f"/api/v1/runs/{shown_run['uid']}/steps").json()["items"]) == 10
    finally:
        service.send_signal(signal.SIGINT)
        rest, _ = service.communicate(timeout=120)
    assert service.returncode == 0, said + rest
    assert not (tmp_path / "data" / "ray.json").exists(), "Ray was left running"
