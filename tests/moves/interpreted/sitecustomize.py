"""Python imports this file at its start where the folder is on its path: so each process of an engine is prepared."""

import os
import sys
from pathlib import Path

if "TRITON_INTERPRET" in os.environ:
    sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
    from second_runner_on_cpu import pretend

    pretend()
