"""The contract of our one patch of vLLM's EngineCore."""

import inspect
from types import SimpleNamespace

import pytest

core = pytest.importorskip("vllm.v1.engine.core")


def test_importing_the_module_adds_one_method_and_replaces_none() -> None:
    from rhyme_openrlhf.engine.patches import core_channel as channel

    assert getattr(core.EngineCore, channel.METHOD) is channel._call_scheduler
    assert channel.METHOD not in inspect.getsource(core)


def test_only_offered_methods_are_called() -> None:
    from rhyme_openrlhf.engine.calls import WorkerCalls
    from rhyme_openrlhf.engine.patches import core_channel
    from rhyme_openrlhf.engine.patches.core_channel import _call_scheduler

    scheduler = SimpleNamespace(
        calls={"double": lambda x: 2 * x}, secret=lambda: 1, core=core_channel.EngineCoreAccess()
    )
    ranks = SimpleNamespace(collective_rpc=lambda method, args: [(method, args)])
    engine = SimpleNamespace(scheduler=scheduler, model_executor=ranks)
    assert _call_scheduler(engine, "double", [4]) == 8
    with pytest.raises(ValueError, match="offers no method 'secret'"):
        _call_scheduler(engine, "secret", [])
    # What was called knows the workers.
    assert scheduler.core.workers(WorkerCalls.rhyme_generator_state, "name") == [("rhyme_generator_state", ("name",))]


def test_a_scheduler_can_say_whether_the_loop_waits_for_calls() -> None:
    """engine/scheduler_parts/moves.py: an engine that expects a sample must see it come."""
    import queue

    from rhyme_openrlhf.engine.patches.core_channel import EngineCoreAccess, _call_scheduler

    access = EngineCoreAccess()
    scheduler = SimpleNamespace(calls={"ask": lambda: access.is_called()}, core=access)
    engine = SimpleNamespace(
        scheduler=scheduler,
        model_executor=SimpleNamespace(collective_rpc=None),
        input_queue=queue.Queue(),
        process_input_queue_block=True,
    )
    assert _call_scheduler(engine, "ask", []) is False
    access.wait_for_calls(False)
    assert engine.process_input_queue_block is False
    engine.input_queue.put("a call")
    assert _call_scheduler(engine, "ask", []) is True
