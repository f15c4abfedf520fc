"""Threads of engines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rhyme_openrlhf.platform.cpu_arguments import keep_openmp_threads

# What vLLM's n-gram lookup does, beside a model; prints the OpenMP threads that the model has then.
LOOKUP = """
import numpy, torch
from numba import njit, prange

@njit(parallel=True)
def lookup(found):
    for at in prange(found.size):
        found[at] = at

lookup(numpy.zeros(2))
print(torch.get_num_threads())
"""


def threads_after_a_lookup() -> int:
    # As vLLM's CPU build has it: one OpenMP for all.
    gomp = next((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    environment = {**os.environ, "LD_PRELOAD": str(gomp), "NUMBA_THREADING_LAYER": "omp"}
    found = subprocess.run([sys.executable, "-c", LOOKUP], env=environment, capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.usefixtures("starts_python")
@pytest.mark.parametrize("threads", ["1", "1,2"])
def test_a_lookup_does_not_give_the_model_more_threads(monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    keep_openmp_threads()
    assert threads_after_a_lookup() == 1


def test_without_a_number_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    keep_openmp_threads()
    assert "NUMBA_NUM_THREADS" not in os.environ
