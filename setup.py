"""Builds the compiled cores with the package: drafts and the course of a stage (csrc/).

Everything else stands in pyproject.toml.
Where there is no C++ compiler the package is built without the cores, and features that need one say so
(rhyme_openrlhf/drafting_core.py). RHYME_SANITIZE=address,undefined or thread builds the core that
tests/history/test_sanitized.py loads.
"""

import os
import platform
from pathlib import Path

from setuptools import setup

STAGE = "csrc/stage.cpp"
MODULES = {
    "rhyme_openrlhf._drafting": sorted({str(path) for path in Path("csrc").glob("*.cpp")} - {STAGE}),
    "rhyme_openrlhf._stage": [STAGE],
}
HEADERS = sorted(str(path) for path in Path("csrc").glob("*.h"))
# The baseline of the processor's family, so that one build runs on all of them: no -march.
INSTRUCTION_SET = f"{platform.machine()} {'sanitized' if os.environ.get('RHYME_SANITIZE') else 'baseline'}"
# -ffp-contract=off: drafts and probabilities are the same on every processor.
FLAGS = ["-O3", "-ffp-contract=off", "-fvisibility=hidden", f'-DRHYME_INSTRUCTION_SET="{INSTRUCTION_SET}"']
SANITIZE = os.environ.get("RHYME_SANITIZE", "")


def extensions() -> list:
    """Return the cores as extension modules, or nothing where pybind11 is not there to build them with."""
    try:
        from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
    except ImportError:
        return []
    ParallelCompile(default=0).install()
    flags = FLAGS
    if SANITIZE:
        # Checked spans: an element that is not there ends the process.
        flags = [*FLAGS, "-O1", "-g", f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS"]
    return [
        Pybind11Extension(
            name,
            sources,
            depends=HEADERS,
            cxx_std=20,
            extra_compile_args=flags,
            extra_link_args=[f"-fsanitize={SANITIZE}"] if SANITIZE else [],
            optional=not SANITIZE,
        )
        for name, sources in MODULES.items()
    ]


setup(ext_modules=extensions())
