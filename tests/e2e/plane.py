"""`rhyme serve` with a Ray of its own, and the command line's client signed in to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RHYME = [sys.executable, "-m", "rhyme_openrlhf.cli.main"]
# Three runs after each other, each of which loads everything; machines are not always idle.
RUN_TIMEOUT_S = 900


class Plane:
    """A service in `folder`, and the client signed in to it."""

    def __init__(self, folder: Path, roots: list[Path]) -> None:
        self.environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config"), "PYTHONUNBUFFERED": "1"}
        self.environment.pop("RAY_ADDRESS", None)
        self._folder, self._roots = folder, roots
        link = self._start(0, r"http://\S+#code=\S+")
        self._port = urlsplit(link).port
        self.runs("login", given=link + "\n")

    @property
    def link(self) -> str:
        """A new sign-in link, which works once."""
        asked = [*RHYME, "serve", "--new-link", f"--serve.data_dir={self._folder / 'data'}"]
        said = subprocess.run(asked, capture_output=True, text=True, env=self.environment, check=True).stdout
        found = re.search(r"http://\S+#code=\S+", said)
        assert found, said
        return found[0]

    def _start(self, port: int, until: str) -> str:
        """Start the service; gives what it says that `until` (a pattern) matches."""
        self.service = subprocess.Popen(
            [*RHYME, "serve", f"--serve.port={port}", f"--serve.data_dir={self._folder / 'data'}",
             f"--serve.roots={':'.join(map(str, self._roots))}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=self._folder,
        )  # fmt: skip
        assert self.service.stdout is not None
        said = ""
        while not (found := re.search(until, said)):
            line = self.service.stdout.readline()
            assert line, f"the service ended: {said}"
            said += line
        return found[0]

    def start_again(self) -> None:
        """After `end`, at the same address. What it knows, it has from its data directory."""
        assert self._port is not None
        self._start(self._port, r"Ctrl-C ends it")

    def runs(self, *arguments: str, given: str | None = None) -> str:
        """What a `rhyme runs` command printed; it must succeed."""
        done = subprocess.run(
            [*RHYME, "runs", *arguments],
            input=given, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, env=self.environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def show(self, run: str) -> Any:
        return json.loads(self.runs("show", run, "--json"))

    def end(self) -> None:
        self.service.send_signal(signal.SIGINT)
        self.service.communicate(timeout=120)
