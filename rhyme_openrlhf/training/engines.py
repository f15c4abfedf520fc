"""The engines of all layouts, what they get before the first rollout, and those that are lost later.

Layouts: engines of all layouts start on the same devices, by OpenRLHF's own `create_vllm_engines`. Given a placement
group, OpenRLHF 0.11.2 asks for a fifth of a GPU for each rank of an engine, in the bundle of its device. So several
ranks share a device, as in its colocated runs (trainer/ray/vllm_engine.py). All layouts get one group: the group of a
colocated run, or one that is made here as OpenRLHF would make it for the aligned engines alone. Engine n of size s is
on devices n*s to (n+1)*s of the group. So a tail engine is on the devices of the aligned engines whose samples it gets.

Profiles: every engine gets the profile by which it plans its drafts, or by which samples are reallocated. It is the
user's file, or the profile kept for this model and hardware. Without both the first engine measures a quick one now
(under a minute), which is kept for later runs.

Invariants:
- A layout starts when the one before it has started, because vLLM wants the memory that it is to take free at start.
- Where KV caches take turns, those of the layouts that have started sleep meanwhile; in the end the aligned ones wake.
- An engine is on one node. (Layouts were never run on a GPU.)
- A profile that the user named and that is of something else ends the run, with the two named side by side.
- Without any profile the run says so, and its drafts follow the fixed rules.
- Every wait has a limit.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import openrlhf.trainer.ray.utils as upstream
import ray
from ray.util.placement_group import placement_group, placement_group_table

from rhyme_openrlhf.engine.calls import DeviceCalls, EngineHandle, RemoteMethod
from rhyme_openrlhf.engine.factory import EngineFactory
from rhyme_openrlhf.engine.messages import Said
from rhyme_openrlhf.engine.port import MeasuredEngine
from rhyme_openrlhf.engine_errors import EngineCallError, EngineCoreError
from rhyme_openrlhf.latency import profile as profiles
from rhyme_openrlhf.latency.measure import QUICKLY, MeasureError, Plan, disturbed, measure
from rhyme_openrlhf.latency.profile import Profile, ProfileError
from rhyme_openrlhf.scheduling.layouts import ALIGNED, check_nodes
from rhyme_openrlhf.settings.latency import AUTO
from rhyme_openrlhf.settings.tp_switch import tail_profiles
from rhyme_openrlhf.telemetry.events import Measuring, Note, NoteLevel, ProcessReady
from rhyme_openrlhf.telemetry.run_directory import versions
from rhyme_openrlhf.telemetry.services import Layouts, RunServices, is_lost
from rhyme_openrlhf.training.layouts import engine_arguments, layout_settings

# Who says what: the trainer before the first rollout, the rollout of lost engines.
SOURCE = "trainer"
# One call to an engine: a burst of decode steps, or reading a file.
CALL_SECONDS = 60.0


def wait_for_engines(engines: list[EngineHandle], services: RunServices) -> None:
    """Wait until every engine has started (upstream lets the first rollout wait), so that no stage starts too early.

    Raises the error of an engine that could not start, or RuntimeError when one takes too long.
    """
    started = time.monotonic()
    limit = services.settings.limits.stage_s
    try:
        ray.get([engine.ready.remote() for engine in engines], timeout=limit)
    except ray.exceptions.GetTimeoutError:
        raise RuntimeError(f"waited {limit:g} s (--limits.stage_s) for {len(engines)} engines to start") from None
    _tell(ray.get([engine.proof.remote() for engine in engines], timeout=CALL_SECONDS), services)
    took = time.monotonic() - started
    # The watch over processes may not have heard of them yet.
    for number in range(len(engines)):
        services.record(ProcessReady(f"engine {number}"), SOURCE)
    services.record(Note("info", f"all engines are ready ({took:.0f} s after the trainer)"), SOURCE)


def _tell(proofs: Sequence[Said | None], services: RunServices) -> None:
    """Say once what engines found of their drafts, and of which engines it is."""
    found: dict[Said, list[int]] = {}
    for number, said in enumerate(proofs):
        if said is not None:
            found.setdefault(said, []).append(number)
    for said, numbers in found.items():
        which = "all engines" if len(numbers) == len(proofs) else f"engines {', '.join(map(str, numbers))}"
        services.record(Note("info" if said.drafts else "warning", f"{which}: {said.text}"), SOURCE)


def ask_engines(engines: list[Any], services: RunServices, ask: Callable[[Any], Any], limit_s: float) -> list[Any]:
    """Return what each engine answers, None of one that is gone. Raises what another one raised, or GetTimeoutError.

    `ask(engine)` asks one engine without waiting.
    """
    until = time.monotonic() + limit_s
    answers = []
    for number, ref in enumerate([ask(engine) for engine in engines]):
        try:
            answers.append(ray.get(ref, timeout=max(0.0, until - time.monotonic())))
        except (ray.exceptions.RayActorError, EngineCoreError):
            if not is_lost(engines, number, services):
                raise
            answers.append(None)
    return answers


def with_tail_layouts(create: Callable[..., list[Any]], factory: EngineFactory, services: RunServices) -> Any:
    """Return upstream's `create_vllm_engines`, which makes the engines of all layouts, aligned ones first."""
    plan = services.layouts
    assert plan is not None
    parameters = inspect.signature(create)

    def create_all(*args: Any, **kwargs: Any) -> list[Any]:
        asked = parameters.bind(*args, **kwargs).arguments
        if asked.get("shared_pg") is None:
            asked["shared_pg"] = _devices(plan.devices, services.settings.limits.stage_s)
        check_nodes(_nodes(asked["shared_pg"], plan.devices), plan.sizes)
        engines: list[list[Any]] = []
        for layout, size in enumerate(plan.sizes):
            if engines:
                _make_room(engines[-1], plan, services)
            factory.use(layout_settings(services.settings, plan, layout), engine_arguments(plan, layout))
            of_layout = {"num_engines": plan.devices // size, "tensor_parallel_size": size}
            engines.append(create(**{**asked, **of_layout}))
        if not plan.both_awake:
            _make_room(engines[-1], plan, services)
            _call(engines[ALIGNED], DeviceCalls.wake_kv, services)
        return [engine for of_layout in engines for engine in of_layout]

    return create_all


@contextmanager
def taking_turn(engines: Sequence[Any], layout: int, services: RunServices) -> Iterator[None]:
    """Within the block, before any sample runs, the engines of a layout have their KV caches."""
    plan = services.layouts
    if plan is None or plan.both_awake or layout == ALIGNED:
        yield
        return
    aligned, own = ([engines[number] for number in plan.numbers(one)] for one in (ALIGNED, layout))
    _call(aligned, DeviceCalls.sleep_kv, services)
    _call(own, DeviceCalls.wake_kv, services)
    try:
        yield
    finally:
        _call(own, DeviceCalls.sleep_kv, services)
        _call(aligned, DeviceCalls.wake_kv, services)


def _make_room(engines: list[Any], plan: Layouts, services: RunServices) -> None:
    """Make room for the next layout to start."""
    wait_for_engines(engines, services)
    if not plan.both_awake:
        _call(engines, DeviceCalls.sleep_kv, services)


def _call(engines: list[Any], method: RemoteMethod[[], None], services: RunServices) -> None:
    ray.get([getattr(engine, method.__name__).remote() for engine in engines], timeout=services.settings.limits.stage_s)


def _devices(count: int, limit_s: float) -> Any:
    """Return a placement group as upstream makes it for engines of their own. Raises RuntimeError without the GPUs."""
    group = placement_group([{"GPU": 1, "CPU": 1} for _ in range(count)], strategy="PACK")
    if not group.wait(limit_s):
        raise RuntimeError(
            f"waited {limit_s:g} s (--limits.stage_s) for {count} GPUs with a CPU core each, for the engines of all "
            "layouts. Other jobs of this Ray cluster hold them, or there are fewer; see: ray status"
        )
    return group


def _nodes(group: Any, count: int) -> list[str]:
    """Return the node of each device, in the order in which upstream gives them to engines."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in upstream.get_bundle_indices(group, 0, count)]


def install_profiles(
    engines: Sequence[Any], services: RunServices, awake: Callable[[], AbstractContextManager[None]]
) -> Profile | None:
    """Give every engine its profile, if drafts are planned by it or samples reallocated; returns it.

    Engines that may be asleep are measured within `awake`. Raises ProfileError for a file that does not fit.
    """
    settings = services.settings
    reallocated = settings.reallocation.enable and not settings.reallocation.threshold
    compared = settings.tp_switch.enable and not settings.tp_switch.samples
    if not (settings.drafts_planned or reallocated or compared) or not engines:
        return None
    plan = services.layouts
    if plan is None:
        return _install(engines, services, awake, settings.latency.profile)
    named = tail_profiles(settings.tp_switch.profile, len(plan.sizes) - 1)
    found = []
    for layout, asked in enumerate((settings.latency.profile, *named)):
        # Engines that sleep between rollouts take no turns.
        own = awake if plan.both_awake else partial(taking_turn, engines, layout, services)
        found.append(_install([engines[number] for number in plan.numbers(layout)], services, own, asked))
    return found[ALIGNED]


def _install(
    engines: Sequence[Any], services: RunServices, awake: Callable[[], AbstractContextManager[None]], asked: str
) -> Profile | None:
    """Give the engines of one layout their profile; `asked`: a file, or AUTO."""
    settings = services.settings

    def say(level: NoteLevel, text: str) -> None:
        services.record(Note(level, text), SOURCE)

    first = MeasuredEngine(engines[0], CALL_SECONDS)
    try:
        if settings.emulate.profile:
            # What is kept for later runs is of this machine's own clock, and only that.
            text = profiles.read_text(Path(settings.emulate.profile))
            say("info", f"drafts follow the step times that are emulated, {settings.emulate.profile}")
        elif asked == AUTO:
            text = _kept_or_quick(first, services, say, awake)
        else:
            path = Path(asked)
            text = profiles.read_text(path)
            profiles.parse(text, f"the profile {path}").check_fits(first.subject(), str(path))
            say("info", f"drafts follow the step times of {path}")
        for engine in engines:
            if refused := MeasuredEngine(engine, CALL_SECONDS).install_profile(text):
                raise ProfileError(refused)
        return profiles.parse(text, "the profile of this run")
    except (MeasureError, EngineCallError) as error:
        say("warning", f"no step times, so drafts follow the fixed rules of --histospec.*: {error}")
        return None


def _kept_or_quick(
    engine: MeasuredEngine, services: RunServices, say: Any, awake: Callable[[], AbstractContextManager[None]]
) -> str:
    path, text = engine.kept_profile()
    if text:
        try:
            kept = profiles.parse(text, f"the profile {path}")
            kept.check_fits(engine.subject(), path)
        except ProfileError as error:
            say("warning", f"{error} It is replaced.")
        else:
            if reason := disturbed(kept):
                say("warning", f"{path} should be measured again with `rhyme profile`: its {reason}")
            say("info", f"drafts follow the step times of {path}")
            completed = _with_unspeculated(kept, engine, say)
            if completed != kept:
                text = profiles.to_text(completed)
                engine.keep_profile(text)
            return text
    began = time.monotonic()
    with awake():
        plan = Plan.of(engine, versions(), QUICKLY)
        total, done = plan.bursts(), itertools.count()
        profile = measure(plan, engine, on_point=lambda words: services.record(Measuring(next(done), total), SOURCE))
        services.record(Measuring(total, total), SOURCE)
    profile = _with_unspeculated(profile, engine, say)
    text = profiles.to_text(profile)
    now = (
        f"drafts follow step times that were measured now, at {len(profile.steps)} points in "
        f"{time.monotonic() - began:.0f} s, and are"
    )
    if reason := disturbed(profile):
        say("warning", f"{now} not kept for later runs: {reason}")
    else:
        engine.keep_profile(text)
        say("info", f"{now} kept as {path} (`rhyme profile` measures more)")
    return text


def _with_unspeculated(profile: Profile, engine: MeasuredEngine, say: Any) -> Profile:
    """Add the steps of an engine without speculation that `engine` measured before its start, if it did."""
    steps, problem = engine.unspeculated()
    if problem:
        say(
            "warning",
            "no step times of an engine without speculation, so what drafts gain is against engines that could draft "
            f"(`rhyme profile` measures both): {problem}",
        )
    if not steps:
        return profile
    say("info", f"what drafts gain is against an engine without speculation, measured now at {len(steps)} points")
    return dataclasses.replace(profile, unspeculated=steps)
