"""`rhyme serve`: what it refuses, and that it serves, shows its links, and ends when it is told to."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

import httpx

import rhyme_openrlhf
from rhyme_openrlhf.cli.serve import ServeError, main, read_options
from rhyme_openrlhf.client import exchange

# On a busy machine, the imports of a service's start take longer than a minute.
LIMIT_SECONDS = 240
pytestmark = pytest.mark.timeout(5 * LIMIT_SECONDS)
# Options for a cluster of other machines.
ELSEWHERE = ["--ray-address", "http://head:8265", "--launch.control_url", "http://here:8420", "--launch.dir", "/shared"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rhyme_openrlhf.__file__).parents[1]), "PYTHONUNBUFFERED": "1"}


def serve(tmp_path: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "serve", "--serve.port=0"]
    command += [f"--serve.data_dir={tmp_path / 'data'}", *more]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT, cwd=tmp_path
    )


def client_of(url: str, token: str = "") -> httpx.Client:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    transport = httpx.HTTPTransport(retries=20)
    return httpx.Client(base_url=url, headers=headers, transport=transport, timeout=LIMIT_SECONDS)


def test_local_is_the_default_and_the_options_are_typed(tmp_path: Path) -> None:
    assert read_options([]).local and read_options(["--local"]).local
    remote = read_options([*ELSEWHERE, "--launch.max_runs", "7"])
    assert not remote.local and remote.launch.max_runs == 7
    assert not read_options(["--no-local"]).local
    with pytest.raises(ServeError, match="give one of them"):
        read_options(["--local", "--ray-address", "http://head:8265"])
    with pytest.raises(ServeError, match="must be the cluster's dashboard"):
        read_options(["--ray-address", "head:6379"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--serve.host", "0.0.0.0"], "can be reached by other machines"),
        (["--launch.max_runs", "0"], "--launch.max_runs must be from 1 to 1000"),
        (["--no-local", "--serve.database", "mysql://x/y"], "the database must be"),
        ([*ELSEWHERE, "--ray-token-file", "/nowhere"], "cannot be read"),
        ([*ELSEWHERE, "--ray-token-file", "{folder}/noise"], "cannot be read: it is no text"),
        (ELSEWHERE[:4], "give --launch.control_url, the address at which they reach this service, and --launch.dir"),
        ([*ELSEWHERE[:2], *ELSEWHERE[4:]], "give --launch.control_url, the address at which they"),
        ([*ELSEWHERE, "--launch.control_url", "http://127.0.0.1:8420"], "is each machine's own address"),
        ([*ELSEWHERE, "--launch.control_url", "http://[::1]:8420"], "is each machine's own address"),
        (["--no-local", "--launch.control_url", "head:8420"], "--launch.control_url must be http://HOST:PORT"),
        (["--no-local", "--serve.database", "postgresql+psycopg://u:secret@127.0.0.1:1/x"], "cannot be used: "),
        (["--no-local", "--serve.database", "postgresql+psycopg://u:secret@no.invalid/x"], "cannot be used: "),
        (["--no-local", "--serve.database", "postgresql+psycopg://u:secret@a..b/x"], "cannot be used: "),
        (["--no-local", "--serve.database", "sqlite:///{folder}/noise"], "cannot be used: file is not a database"),
        (["--no-local", "--serve.database", "sqlite:///{folder}"], "cannot be used: unable to open"),
        (["--no-local", "--serve.database", "sqlite:///{folder}/noise/inner/db"], "cannot be used: "),
        (["--no-local", "--serve.database", "sqlite:///{folder}/newer"], "has schema '9999', which this version"),
        (["--no-local", "--serve.database", "sqlite:///{folder}/foreign"], "cannot be used: table runs already exists"),
        (["--no-local", "--serve.host", "no.invalid", "--serve.insecure_public"], "cannot listen on no.invalid:0"),
        (["--no-local", "--serve.host", "a..b", "--serve.insecure_public"], "cannot listen on a..b:0"),
        (["--no-local", "--serve.tls_cert", "/nowhere", "--serve.tls_key", "/nowhere"], "No such file"),
        (["--no-local", "--serve.tls_cert", "{folder}/noise", "--serve.tls_key", "{folder}/noise"], "cannot be used: "),
    ],
)
def test_what_cannot_be_served_costs_one_sentence(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], starts_listener: None
) -> None:
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 40)
    for name, statement in (
        (
            "newer",
            "CREATE TABLE alembic_version (version_num VARCHAR(32)); INSERT INTO alembic_version VALUES ('9999')",
        ),
        ("foreign", "CREATE TABLE runs (id INTEGER)"),
    ):
        with contextlib.closing(sqlite3.connect(tmp_path / name)) as other:
            other.executescript(statement)
    given = [one.format(folder=tmp_path) for one in arguments]
    assert main([*given, f"--serve.data_dir={tmp_path}/data", "--serve.port=0"]) == 2
    said = capsys.readouterr()
    assert message in said.err and said.err.startswith("rhyme serve: error: ") and "secret" not in said.err
    assert said.err.count("\n") == 1 and "Traceback" not in said.out + said.err


def test_a_port_that_is_taken_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], starts_listener: None
) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["--no-local", f"--serve.port={port}", f"--serve.data_dir={tmp_path}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_it_serves_shows_a_link_at_each_start_and_ends(tmp_path: Path, starts_service: None) -> None:
    links = []
    for end in (signal.SIGINT, signal.SIGTERM):
        process = serve(tmp_path, "--no-local")
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        address = re.search(r"http://127\.0\.0\.1:\d+", lines[0])
        assert address, lines
        with client_of(address[0]) as client:
            assert client.get("/healthz").status_code == 200
            assert client.get("/api/v1/runs").status_code == 401
        if end is signal.SIGINT:
            second = serve(tmp_path, "--no-local")
            said, _ = second.communicate(timeout=LIMIT_SECONDS)
            assert second.returncode == 2 and "another `rhyme serve` uses" in said
        process.send_signal(end)
        rest, _ = process.communicate(timeout=LIMIT_SECONDS)
        assert process.returncode == 0, rest
        links += re.findall(r"#code=(\S+)", "".join(lines) + rest)
    assert len(set(links)) == 2


def test_a_new_link_is_printed_while_a_service_runs_and_after(tmp_path: Path, starts_service: None) -> None:
    process = serve(tmp_path, "--no-local")
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        # What the service printed itself is lost.
        assert "#code=" in process.stdout.readline()
        address, code = new_link(tmp_path)
        with client_of(address) as browser:
            assert browser.post("/api/v1/session", json={"token": code}).json()["role"] == "operator"
            assert browser.get("/api/v1/tokens").status_code == 200
            assert browser.post("/api/v1/session", json={"token": code}).status_code == 401
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_SECONDS)
    assert new_link(tmp_path)[0] == address


def test_links_lead_to_the_proxy(tmp_path: Path, starts_service: None) -> None:
    proxied = "--serve.trusted_proxies=127.0.0.1", "--launch.control_url=https://rhyme.example.org/"
    process = serve(tmp_path, "--no-local", *proxied)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("rhyme serve: http://127.0.0.1:")
        assert "(this link works once): https://rhyme.example.org/#code=" in process.stdout.readline()
        said, _ = serve(tmp_path, "--new-link").communicate(timeout=LIMIT_SECONDS)
        assert "(this link works once): https://rhyme.example.org/#code=" in said
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_SECONDS)


def new_link(tmp_path: Path) -> tuple[str, str]:
    """Address and code of a new link for the service of the test."""
    asking = serve(tmp_path, "--new-link")
    said, _ = asking.communicate(timeout=LIMIT_SECONDS)
    found = re.search(r"(http://127\.0\.0\.1:\d+)/#code=(\S+)\n", said)
    assert asking.returncode == 0 and found, said
    return found[1], found[2]


def test_a_new_link_needs_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--new-link", f"--serve.data_dir={tmp_path / 'none'}"]) == 2
    assert f"there is no database {tmp_path}/none/rhyme.sqlite: start `rhyme serve`" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
    assert main(["--new-link", "--serve.database=postgresql+psycopg://rhyme:secret@127.0.0.1:1/rhyme"]) == 2
    said = capsys.readouterr().err
    assert "cannot be used" in said and "secret" not in said
    assert main(["--new-link", "--demo"]) == 2
    assert "give one of them" in capsys.readouterr().err


def test_a_service_whose_output_nobody_reads_goes_on(tmp_path: Path, starts_service: None) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rhyme_openrlhf.cli.main", "serve", "--no-local", f"--serve.port={port}"]
    with os.fdopen(writer, "wb") as closed:
        process = subprocess.Popen(
            [*command, f"--serve.data_dir={tmp_path}"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        with contextlib.suppress(httpx.TransportError):
            assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=LIMIT_SECONDS).status_code == 200
            break
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, said) == (0, "")


def test_a_second_service_on_the_database_says_who_starts_runs(tmp_path: Path, starts_service: None) -> None:
    first = serve(tmp_path, "--no-local")
    assert first.stdout is not None
    address = re.search(r"http://127\.0\.0\.1:\d+", first.stdout.readline())
    assert address
    with client_of(address[0]) as client:
        assert client.get("/readyz").status_code == 200
    assert "#code=" in first.stdout.readline()
    second = serve(
        tmp_path, "--no-local", f"--serve.data_dir={tmp_path / 'second'}",
        f"--serve.database=sqlite:///{tmp_path}/data/rhyme.sqlite",
    )  # fmt: skip
    assert second.stdout is not None
    assert "rhyme serve: http://" in second.stdout.readline()
    assert "#code=" in second.stdout.readline()
    said = second.stdout.readline()
    assert said.startswith("rhyme serve: this service does not dispatch") and f"process {first.pid} on " in said
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "rhyme.sqlite")) as store:
        holder = "SELECT service FROM dispatch_lease"
        held = store.execute(holder).fetchone()
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=LIMIT_SECONDS)
        # An orderly end gives the lease up. How soon the second service notices depends on the machine.
        assert store.execute(holder).fetchone() != held
    assert second.stdout.readline().startswith("rhyme serve: this service dispatches now")
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=LIMIT_SECONDS)
    assert second.returncode == 0


def test_the_demonstration_shows_runs_without_ray_and_leaves_nothing(tmp_path: Path, starts_service: None) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    # Nothing of the training stack may be needed: an import of it ends the process.
    blocked = "import sys; [sys.modules.__setitem__(name, None) for name in ('ray', 'torch', 'vllm', 'openrlhf')]; "
    command = [sys.executable, "-c", blocked + "from rhyme_openrlhf.cli.main import main; sys.exit(main())"]
    process = subprocess.Popen(
        [*command, "serve", "--demo", "--serve.port=0"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
        env={**ENVIRONMENT, "TMPDIR": str(folder)},
    )  # fmt: skip
    assert process.stdout is not None
    assert "a demonstration" in process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert address
    link = re.search(r"#code=(\S+)", process.stdout.readline())
    assert link
    token = exchange(address[0], link[1], "test").token
    with client_of(address[0] + "/api/v1", token) as client:
        runs = {run["name"]: run for run in client.get("/runs").json()["items"]}
        # Three seeds with drafts and three without, an asynchronous run, a made one, and the one that is replayed.
        assert len(runs) == 9 and all(run["tags"] in (["recording"], ["synthetic"]) for run in runs.values())
        live = next(run for name, run in runs.items() if "replayed" in name)
        assert live["status"] == "running" and 0 < live["step"] < live["steps_total"]
        assert all(run["status"] == "succeeded" for run in runs.values() if run is not live)
        uid = live["uid"]
        assert "recording" in client.get(f"/runs/{uid}").json()["notes"]
        step = client.get(f"/runs/{uid}/sample-records").json()["items"][0]["step"]
        assert client.get(f"/runs/{uid}/sample-records/{step}").json()["matching"] == 16
        assert client.get(f"/runs/{uid}/system", params={"name": "cpu"}).json()["nodes"]
        assert client.get(f"/runs/{uid}/attempts/1/logs").json()
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0, rest
    assert list(folder.iterdir()) == []


def test_a_demonstration_has_a_folder_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    for more in (["--local"], ["--serve.data_dir", "x"], ["--ray-address", "http://head:8265"], ["--serve.roots", "/"]):
        assert main(["--demo", *more]) == 2
        assert "--demo shows recordings from a folder of its own" in capsys.readouterr().err
    assert not read_options(["--demo"]).local


def test_local_starts_ray_and_stops_it_again(tmp_path: Path, starts_ray: None, starts_service: None) -> None:
    pytest.importorskip("ray")
    process = serve(tmp_path, "--local")
    assert process.stdout is not None
    assert "starting Ray" in process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
    assert address
    link = re.search(r"#code=(\S+)", process.stdout.readline())
    assert link
    token = exchange(address[0], link[1], "test").token
    with client_of(address[0], token) as client:
        verdict = client.post("/api/v1/specs/validate", json={"command": "rhyme demo"}).json()
        assert verdict["valid"], verdict
    assert (tmp_path / "data" / "ray.json").exists()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 0 and not (tmp_path / "data" / "ray.json").exists()
