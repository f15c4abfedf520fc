"""From a profile to an engine, and what a profile leaves open."""

from __future__ import annotations

from collections.abc import Mapping

from rhyme_openrlhf.latency.profile import Profile
from rhyme_openrlhf.latency.transfer_model import TransferModel
from rhyme_openrlhf.simulation.engine import EngineKind
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.step_times import StepTimes


def engine_kind(profile: Profile, cluster: Cluster, features: Features) -> EngineKind:
    """An engine of this profile."""
    transfer = TransferModel(profile)
    return EngineKind(
        StepTimes(profile, cluster.lookup_seconds if features.speculation != "off" else 0.0),
        transfer,
        # Without measured prefills they take no time; `gaps` says so beside every result.
        transfer.prefill_seconds if profile.prefills else lambda lengths: 0.0,
        profile.kv_cache_tokens,
        cluster.running,
        cluster.step_tokens,
    )


def gaps(profiles: Mapping[int, Profile]) -> list[str]:
    """What the profiles do not have and a simulation with them therefore counts as free, or cannot use."""
    found = []
    for size, profile in sorted(profiles.items()):
        if not profile.prefills:
            found.append(f"TP {size}: prefills are not profiled and take no time here")
        if not profile.weight_load_seconds:
            found.append(f"TP {size}: weight loads are not profiled and take no time here")
        if not profile.kv_bytes_per_second:
            found.append(f"TP {size}: KV transfers are not profiled; moved samples are computed again")
    return found
