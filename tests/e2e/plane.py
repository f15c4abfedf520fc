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

RHYME = [sys.executable, "-m", "rhyme_openrlhf.cli.main"]
# Three runs after each other, each of which loads everything; machines are not always idle.
RUN_TIMEOUT_S = 420


class Plane:
    """A service in `folder`, and the client signed in to it."""

    def __init__(self, folder: Path, roots: list[Path]) -> None:
        self.environment = {**os.environ, "XDG_CONFIG_HOME": str(folder / "config"), "PYTHONUNBUFFERED": "1"}
        self.environment.pop("RAY_ADDRESS", None)
        self.service = subprocess.Popen(
            [*RHYME, "serve", "--serve.port=0", f"--serve.data_dir={folder / 'data'}",
             f"--serve.roots={':'.join(map(str, roots))}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.environment, cwd=folder,
        )  # fmt: skip
        assert self.service.stdout is not None
        said = ""
        while not (link := re.search(r"http://\S+#token=\S+", said)):
            line = self.service.stdout.readline()
            assert line, f"the service ended: {said}"
            said += line
        self.link = link[0]
        self.runs("login", given=self.link + "\n")

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
