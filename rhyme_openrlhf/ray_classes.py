"""OpenRLHF's Ray actor classes as plain classes that can be subclassed.

`@ray.remote` turns a class into an ActorClass that refuses to be subclassed. The plain class is still inside it. But
Ray pickles inherited methods by value unless `module.qualname` resolves to them. Then zero-argument `super()` and the
module's globals break in the worker. So `plain_class` gives the class and its own functions an address that does
resolve: the module that calls it, under the name it assigns. Checked against Ray 2.55.0 (`tests/test_ray_classes.py`).
"""

from __future__ import annotations

import inspect
from typing import Any

# For actors that handle no tensors: with OpenRLHF's setting of 1, Ray imports torch into every worker process.
WITHOUT_TORCH = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "0"}


def plain_class(actor_class: Any, module: str, name: str) -> Any:
    """Return the plain class behind a Ray ActorClass.

    The caller must assign the result to the module-level name `name` in `module` (its own `__name__`):

        PlainTrainer = plain_class(upstream.Trainer, __name__, "PlainTrainer")

    Raises TypeError if `actor_class` is not a Ray ActorClass of the checked version.
    """
    metadata = getattr(actor_class, "__ray_metadata__", None)
    cls = getattr(getattr(metadata, "modified_class", None), "__ray_actor_class__", None)
    if cls is None:
        raise TypeError(f"{actor_class!r} is not a Ray actor class as Ray 2.55 makes them")
    for function in vars(cls).values():
        if inspect.isfunction(function):
            function.__module__ = module
            function.__qualname__ = f"{name}.{function.__name__}"
    cls.__module__, cls.__qualname__ = module, name
    return cls
