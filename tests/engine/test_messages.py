"""News on its way through a process that only passes outputs on."""

from __future__ import annotations

import pickle
from typing import Any

from rhyme_openrlhf.engine.messages import Grown, News, Packed, unpacked

unpickled: list[int] = []


class Output:
    """An output that notes where it is unpickled."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return made, (self.number,)


def made(number: int) -> Output:
    unpickled.append(number)
    return Output(number)


def test_outputs_are_unpickled_by_their_reader_alone() -> None:
    unpickled.clear()
    news = News({"1.0": Output(1), "2.0": ValueError("of the engine")}, {"3.0": Grown(0, (5,))}, 4, True)
    assert isinstance(news.finished["1.0"], Output)
    there = pickle.loads(pickle.dumps(news))
    assert (there.grown, there.weight_version, there.open) == (news.grown, 4, True)
    assert str(there.finished["2.0"]) == "of the engine"
    passed_on = pickle.loads(pickle.dumps(there.finished["1.0"]))
    assert isinstance(passed_on, Packed) and unpickled == []
    assert unpacked(passed_on).number == 1 and unpickled == [1]
