"""Values that are cached for a moment."""

from __future__ import annotations

from rhyme_openrlhf.api.store.read_cache import Fresh


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_value_is_given_for_its_time_and_not_longer() -> None:
    clock = Clock()
    kept: Fresh[str] = Fresh(1.0, 10, clock)
    kept.put("a", "one", kept.before_reading())
    clock.now = 0.9
    assert (kept.get("a"), kept.get("b")) == ("one", None)
    clock.now = 1.0
    assert kept.get("a") is None


def test_what_was_read_before_it_was_forgotten_is_not_kept() -> None:
    kept: Fresh[str] = Fresh(1.0, 10, Clock())
    kept.put("a", "old", kept.before_reading())
    before = kept.before_reading()
    kept.forget()
    kept.put("a", "read before the change", before)
    assert kept.get("a") is None
    kept.put("a", "new", kept.before_reading())
    assert kept.get("a") == "new"


def test_no_more_than_its_capacity_is_kept() -> None:
    kept: Fresh[int] = Fresh(1.0, 3, Clock())
    for key in range(10):
        kept.put(key, key, kept.before_reading())
    assert sum(kept.get(key) is not None for key in range(10)) <= 3 and kept.get(9) == 9
