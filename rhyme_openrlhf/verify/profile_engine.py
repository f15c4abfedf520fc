"""The engine that `rhyme profile` measures: a run's own rollout actor with filled contexts.

Invariant: every engine argument that does not serve measuring is the run's. An engine without speculation has nothing
that serves measuring, because a connector could keep vLLM from the model runner and graphs it would take else.
"""

from __future__ import annotations

from typing import Any

from rhyme_openrlhf.engine.actor import speculation_arguments
from rhyme_openrlhf.engine.actor_parts.carrying_measuring import CarryingMeasuring
from rhyme_openrlhf.engine.profiling_connector import FILLED
from rhyme_openrlhf.settings.config import RhymeSettings
from rhyme_openrlhf.verify.engine_actor import VerifyEngine

CONNECTOR = "rhyme_openrlhf.engine.profiling_connector"


class ProfileEngine(CarryingMeasuring, VerifyEngine):
    """One vLLM engine whose steps are timed."""

    def context_arguments(self) -> dict[str, Any]:
        """Contexts are filled by the connector, where the engine has it."""
        return {FILLED: True} if self.rhyme.histospec.enable else {}

    @staticmethod
    def plugins(rhyme: RhymeSettings) -> dict[str, Any]:
        """The run's, with the connector that fills contexts."""
        if not rhyme.histospec.enable:
            return speculation_arguments(rhyme)
        connector = {
            "kv_connector": "ProfilingConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
        }
        return speculation_arguments(rhyme) | {"kv_transfer_config": connector}
