"""Shared by all tests: OpenRLHF must be importable on a machine without a GPU."""

import importlib.util

# The pure parts are tested without torch too.
if importlib.util.find_spec("torch"):
    from rhyme_openrlhf.platform import gpu_present, shims

    if not gpu_present():
        shims.install()
