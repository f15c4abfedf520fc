"""The compiled core's tests once more, with a core that finds what C++ itself does not notice.

AddressSanitizer and UndefinedBehaviorSanitizer, with checked spans. The core has no threads.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Loads the sanitized core before anything imports the usual one.
SITE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("rhyme_openrlhf._drafting", {path!r})
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
assert core.INSTRUCTION_SET.endswith("sanitized")
sys.modules["rhyme_openrlhf._drafting"] = core
"""
OF_CORE = [
    "tests/test_drafting_core.py", "tests/history/test_index.py", "tests/history/test_cursor.py", "tests/drafting",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_core_is_clean(tmp_path: Path, starts_python: None) -> None:
    built = tmp_path / "built"
    build = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(built), "--build-temp", str(tmp_path)]
    subprocess.run(
        build, cwd=ROOT, env={**os.environ, "RHYME_SANITIZE": "address,undefined"}, check=True, capture_output=True
    )
    (core,) = built.rglob("_drafting*.so")
    (tmp_path / "sitecustomize.py").write_text(SITE.format(path=str(core)))
    # Python is not linked with it, and an exception must find the C++ library that the sanitizer has wrapped.
    preload = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    # Reports go to a file, because pytest keeps what tests write. Python does not give back all memory that it has.
    report = f"log_path={tmp_path}/report"
    options = {"ASAN_OPTIONS": f"detect_leaks=0:{report}", "UBSAN_OPTIONS": report}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *OF_CORE],
        cwd=ROOT,
        env={**os.environ, **options, "LD_PRELOAD": " ".join(preload), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    reports = "".join(path.read_text()[:4000] for path in tmp_path.glob("report*"))
    assert done.returncode == 0 and not reports, reports + done.stdout[-4000:] + done.stderr[-4000:]
