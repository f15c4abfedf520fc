"""Subclassing a Ray actor class: in the worker, super() and module globals work."""

import pytest
import ray

from rhyme_openrlhf.ray_classes import plain_class


@ray.remote
class Upstream:
    def __init__(self, start: int) -> None:
        self.start = start

    def value(self) -> int:
        return self.start


def test_the_plain_class_can_be_subclassed_and_has_an_address() -> None:
    plain = plain_class(Upstream, __name__, "Plain")

    class Ours(plain):  # type: ignore[misc, valid-type]
        def value(self) -> int:
            return super().value() + 1

    assert Ours(4).value() == 5
    assert (plain.__module__, plain.__qualname__) == (__name__, "Plain")
    assert plain.value.__qualname__ == "Plain.value"


def test_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="is not a Ray actor class"):
        plain_class(dict, __name__, "Plain")


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("rhyme_openrlhf.training.model_actors", "PlainPolicyModelActor"),
        ("rhyme_openrlhf.training.trainer", "PlainPPOTrainer"),
        ("rhyme_openrlhf.training.trainer_async", "PlainTrainingActor"),
        ("rhyme_openrlhf.training.trainer_async", "PlainGenerateSamplesActor"),
        ("rhyme_openrlhf.training.trainer_async", "PlainPPOTrainerAsync"),
        ("rhyme_openrlhf.engine.actor", "PlainRolloutActor"),
    ],
)
def test_every_class_we_take_from_upstream_resolves_where_it_says(module: str, name: str) -> None:
    """Ray pickles by reference only what `module.qualname` resolves to."""
    import functools
    import importlib
    import inspect

    found = importlib.import_module(module)
    cls = getattr(found, name)
    for function in vars(cls).values():
        if inspect.isfunction(function):
            resolved = functools.reduce(getattr, function.__qualname__.split("."), found)
            assert resolved is function
