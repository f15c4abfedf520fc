"""Machines of a network on this one: each has its network, its /dev/shm, its disk for Ray and its name.

Network and mount namespaces do it, which need root. Files elsewhere, a test's folder among them, are shared by all
machines. Process numbers are this machine's, so that a test sees every process and can end it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

SPACES = ("--net", "--mount", "--uts")
# Ends with its standard input, which this process holds.
SWITCH = "ip link set lo up; ip link add hub type bridge; ip link set hub up; echo up; exec cat >/dev/null"
# As Debian does it, a machine's own name means its loopback.
MACHINE = """
set -e
mkdir -p /tmp/ray
mount -t tmpfs -o size=2g tmpfs /tmp/ray
mount -t tmpfs -o size=1g tmpfs /dev/shm
{ echo 127.0.0.1 localhost; echo 127.0.1.1 $1; grep -v " $1\\$" "$2"; } >/tmp/ray/hosts
mount --bind /tmp/ray/hosts /etc/hosts
hostname $1
ip link set lo up
echo up
exec cat >/dev/null
"""
LIMIT_S = 60.0


class Machine:
    """One machine: `run` starts a program there, `lose` ends it as a cut of its power does."""

    def __init__(self, name: str, hosts: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            ["unshare", *SPACES, "bash", "-c", MACHINE, "machine", name, str(hosts)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "up\n"
        self.pid = self._process.pid
        self._network = os.readlink(f"/proc/{self.pid}/ns/net")

    def entered(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` there."""
        return ["nsenter", "-t", str(self.pid), *SPACES, *command]

    def run(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program there."""
        return subprocess.Popen(self.entered(command), **options)

    def lose(self) -> None:
        """End every process there."""
        end = time.monotonic() + LIMIT_S
        while left := [pid for pid in self._processes() if pid != self.pid]:
            assert time.monotonic() < end, f"still there: {left}"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def end(self) -> None:
        """Give the machine back."""
        self.lose()
        self._process.communicate()

    def _processes(self) -> list[int]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                zombie = (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                if not zombie and os.readlink(process / "ns" / "net") == self._network:
                    found.append(int(process.name))
        return found


class Machines:
    """Machines by name, with an address each ("10.77.0.1/24", "fd77::1/64"). Skips where there are no namespaces."""

    def __init__(self, folder: Path, addresses: Mapping[str, str]) -> None:
        if os.geteuid() or subprocess.run(["unshare", *SPACES, "ip", "link"], capture_output=True).returncode:
            pytest.skip("this machine gives no namespaces")
        hosts = folder / "hosts"
        hosts.write_text("".join(f"{address.partition('/')[0]} {name}\n" for name, address in addresses.items()))
        self._switch = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", SWITCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._switch.stdout is not None and self._switch.stdout.readline() == "up\n"
        self.by_name = {name: Machine(name, hosts) for name in addresses}
        for number, (name, address) in enumerate(addresses.items()):
            self._plug_in(f"port{number}", self.by_name[name], address)

    def __getitem__(self, name: str) -> Machine:
        return self.by_name[name]

    def end(self) -> None:
        """End all of them."""
        for machine in self.by_name.values():
            machine.end()
        self._switch.communicate()

    def _plug_in(self, port: str, machine: Machine, address: str) -> None:
        for pid, command in (
            (self._switch.pid, f"link add {port} type veth peer name eth0 netns {machine.pid}"),
            (self._switch.pid, f"link set {port} master hub up"),
            (machine.pid, f"addr add {address} dev eth0 {'nodad' if ':' in address else ''}"),
            (machine.pid, "link set eth0 up"),
        ):
            subprocess.run(["nsenter", "-t", str(pid), "--net", "ip", *command.split()], check=True)
