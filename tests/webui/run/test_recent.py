"""The change in a run's newest steps: against as many before them, and clear only beyond their noise."""

from rhyme_openrlhf.webui.run.recent import RECENT, recent_change

LEVEL = [0.4, 0.6] * RECENT


def test_a_change_is_against_as_many_steps_before() -> None:
    found = recent_change([9.0, *[1.0] * RECENT, None, *[3.0] * RECENT])
    assert found is not None and (found.by, found.steps, found.is_clear) == (2.0, RECENT, True)
    assert recent_change([1.0, 2.0, 3.0]) is None


def test_a_change_within_the_noise_of_steps_is_not_clear() -> None:
    noisy = recent_change([*LEVEL[:RECENT], *(value + 0.05 for value in LEVEL[:RECENT])])
    far = recent_change([*LEVEL[:RECENT], *(value + 0.5 for value in LEVEL[:RECENT])])
    assert noisy is not None and not noisy.is_clear
    assert far is not None and far.is_clear
    level = recent_change([1.0] * 8)
    assert level is not None and not level.is_clear
