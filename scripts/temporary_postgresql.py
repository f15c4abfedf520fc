#!/usr/bin/env python3
"""A PostgreSQL server of its own, in a temporary directory, for tests and benchmarks.

    scripts/temporary_postgresql.py [--fsync] [-- COMMAND ...]

Prints the URL of an empty database on one line and stays until its standard input ends; or runs COMMAND with
DATABASE_URL set, and ends with it. Then the server is stopped and everything deleted. Exit status 3: PostgreSQL's
programs are not installed (Debian: postgresql). Without --fsync it forgoes what only a loss of power needs, and
has its files in memory where there is room. A slow disk takes a third of a second for each database.

It listens on a socket in its directory alone. PostgreSQL refuses to run as root: then it runs as the user postgres, or
nobody if there is none.
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MISSING = 3
DEBIAN_PROGRAMS = "/usr/lib/postgresql"
# Making a cluster writes about 40 MB, and a start recovers it: a slow disk and a busy machine take long.
LIMIT_SECONDS = 300
MEMORY = "/dev/shm"
# PostgreSQL keeps up to 1 GB of its log of changes. Containers often have 64 MB of such memory.
ROOM_BYTES = 2 * 1024**3


def programs() -> Path | None:
    """Return the directory of initdb and pg_ctl, of the newest version installed."""
    newest = sorted(Path(DEBIAN_PROGRAMS).glob("*/bin/initdb"), key=lambda path: int(path.parts[-3].split(".")[0]))
    if newest:
        return newest[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


class Server:
    """The server; `stop` deletes it."""

    def __init__(self, bin_directory: Path, fsync: bool, folder: str = "/tmp") -> None:
        """`folder` must be short: a socket's path may have no more than 107 characters."""
        self._bin = bin_directory
        # Not `rhyme-`: tests look for what a training run left in shared memory by that name, also beside this server.
        self._home = Path(tempfile.mkdtemp(prefix="postgresql-", dir=folder))
        self._user = _unprivileged()
        if self._user is not None:
            os.chown(self._home, self._user.pw_uid, self._user.pw_gid)
        self._run("initdb", "-D", self._data, "-U", "rhyme", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        self._options = f"-c listen_addresses= -c unix_socket_directories={self._home} -c max_connections=200"
        if not fsync:
            self._options += " -c fsync=off -c synchronous_commit=off -c full_page_writes=off"
        self.start()
        self.url = f"postgresql+psycopg://rhyme@/postgres?host={self._home}"

    @property
    def _data(self) -> str:
        return str(self._home / "data")

    @property
    def process(self) -> int:
        """Process id of the server that was started last; its children serve the connections."""
        return int((self._home / "data" / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        """Start it, also after it was killed."""
        self._run("pg_ctl", "-D", self._data, "-w", "-l", str(self._home / "log"), "-o", self._options, "start")

    def stop(self) -> None:
        """Stop at once and delete everything."""
        try:
            self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")
        finally:
            shutil.rmtree(self._home, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        user = self._user
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            # A pipe would be held open by the server itself.
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self._home,
            user=None if user is None else user.pw_uid,
            group=None if user is None else user.pw_gid,
            extra_groups=None if user is None else [],
            start_new_session=True,
            # pg_ctl itself would give up after a minute.
            env={**os.environ, "PGCTLTIMEOUT": str(LIMIT_SECONDS)},
            timeout=LIMIT_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} failed with {done.returncode}; the server's log is {self._home / 'log'}")


def _unprivileged() -> pwd.struct_passwd | None:
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return pwd.getpwnam("nobody")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until standard input or the command ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsync", action="store_true", help="write as a real server does")
    parser.add_argument("command", nargs="*")
    chosen = parser.parse_args(argv)
    found = programs()
    if found is None:
        print("PostgreSQL's programs are not installed (Debian: postgresql)", file=sys.stderr)
        return MISSING
    # So that a terminated script still stops its server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= ROOM_BYTES
    server = Server(found, chosen.fsync, MEMORY if room and not chosen.fsync else "/tmp")
    try:
        if chosen.command:
            return subprocess.run(
                chosen.command, env={**os.environ, "DATABASE_URL": server.url}, check=False
            ).returncode
        print(server.url, flush=True)
        sys.stdin.read()
        return 0
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
