"""The moment a node switches to its tail layout, and the reasons not to: on faithful fakes of engines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rhyme_openrlhf.engine.messages import SampleRequest
from rhyme_openrlhf.kv.buffer import KvBufferStore
from rhyme_openrlhf.moves.engine_reports import EngineReports
from rhyme_openrlhf.moves.keeper import SampleKeeper
from rhyme_openrlhf.moves.mover import Choice, Mover, MoveRecord
from rhyme_openrlhf.moves.tp_switcher import TpSwitcher, has_room
from rhyme_openrlhf.scheduling.engine_status import DecodeMean, EngineStatus
from rhyme_openrlhf.scheduling.layouts import LayoutPlan, Tail
from rhyme_openrlhf.scheduling.move import KV_TRANSFER, Move, MoveRefused, NotYet, Phase
from rhyme_openrlhf.scheduling.tp_switch import EACH_SECONDS
from rhyme_openrlhf.settings.tp_switch import TpSwitchSettings
from rhyme_openrlhf.telemetry.events import LayoutSwitched
from tests import virtual_time
from tests.moves.fakes import OnDevices, expected, profile

PLAN = LayoutPlan(2, 1, (Tail(1, 2),))


@pytest.fixture(autouse=True)
def seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.moves.fakes.SEATS", 50)


async def generate(
    folder: Path,
    settings: TpSwitchSettings,
    lengths: list[int],
    profiles: tuple[float, float] | None,
    faults: dict[int, tuple[str, str]],
) -> tuple[list[LayoutSwitched], list[Any], list[OnDevices], bool]:
    def fault(number: int) -> Any:
        when, what = faults.get(number, ("", ""))
        return lambda method: what if method == when else ""

    engines = [OnDevices(fault(number)) for number in range(3)]
    for number, engine in enumerate(engines):
        engine.number, engine.told = number, []
    keeper = SampleKeeper(dict(enumerate(engines)), 0.001, spare=[2])
    moved: list[Any] = []
    mover = Mover(keeper, KvBufferStore(folder), lambda *_: Choice(KV_TRANSFER), 1.0, moved.append)
    came = 0

    events: list[LayoutSwitched] = []
    reports = EngineReports(keeper, settings.status_s, lambda text: None, PLAN.layouts())
    if profiles is not None:
        for layout, seconds in enumerate(profiles):
            reports.install(profile(seconds), layout)
    switcher = TpSwitcher(
        settings, PLAN, keeper, reports, mover, events.append, lambda: 7, lambda: came == len(lengths)
    )
    switcher.place({0: "here", 1: "here", 2: "here"})

    async def watch() -> None:
        while True:
            await asyncio.sleep(settings.status_s)
            await reports.hear()
            switcher.look()

    keeper.start()
    loop = asyncio.create_task(watch())
    running = []
    early = False
    for number, length in enumerate(lengths):
        asked = SampleRequest((number + 1,), SimpleNamespace(max_tokens=length, seed=None))
        running.append((asked, asyncio.create_task(keeper.generate(asked, number % 2))))
        await asyncio.sleep(0.02)
        early |= bool(moved)
        came += 1
    for asked, task in running:
        assert (await task)[0] == expected(asked)
    loop.cancel()
    switcher.stop()
    reports.stop()
    keeper.stop()
    assert not list(folder.iterdir())
    return events, moved, engines, early


def run(folder: Path, lengths: list[int], profiles: Any = None, faults: Any = None, **settings: Any) -> Any:
    asked = TpSwitchSettings(enable=True, status_s=0.02, **settings)
    return virtual_time.run(generate(folder, asked, lengths, profiles, faults or {}), 60)


def test_what_is_left_of_a_step_goes_to_the_tail_engine(tmp_path: Path) -> None:
    events, moved, engines, early = run(tmp_path, [100, 100, 1500, 1500], samples=2)
    (event,) = events
    assert (event.step, event.node, event.from_tp, event.to_tp, event.samples) == (7, "here", 1, 2, 2)
    assert {(one.move.destination, one.cause) for one in moved} == {(2, "tp_switch")} and not early
    assert engines[2].told == ["begin_switch", "end_switch"]
    assert engines[0].told == engines[1].told == ["lend_devices"]


def test_step_times_decide_where_no_number_is_given(tmp_path: Path) -> None:
    slower, faster = (0.01, 0.02), (0.02, 0.002)
    assert run(tmp_path, [900, 900], slower, rule="maximum")[0] == []
    events, _, _, early = run(tmp_path, [900, 900], faster, rule="maximum")
    # Not before all prompts have come.
    assert len(events) == 1 and not early
    # Without step times of both layouts nothing is compared.
    assert run(tmp_path, [900, 900])[0] == []


def test_a_sample_that_cannot_go_is_not_asked_again(tmp_path: Path) -> None:
    events, moved, engines, _ = run(tmp_path, [900, 900], faults={2: ("hold_room", "fails")}, samples=2)
    assert events == [] and len(moved) == 2
    assert engines[2].told == ["begin_switch", "end_switch"] and engines[0].told == []


@pytest.mark.parametrize("method", ["hold_room", "import_kv", "expect_sample", "start_sample"])
def test_a_tail_engine_that_dies_in_the_switch_takes_no_sample_with_it(tmp_path: Path, method: str) -> None:
    """That every sample is answered rightly is seen to where they are generated."""
    events, _, engines, _ = run(tmp_path, [900, 900, 900], faults={2: (method, "dies")}, samples=3)
    assert events == [] and not engines[2].alive
    assert not any(engine.here or engine.rooms for engine in engines[:2])


@pytest.mark.parametrize("method", ["export_kv", "stop_sample", "discard_sample"])
def test_an_aligned_engine_that_dies_in_the_switch_takes_no_sample_with_it(tmp_path: Path, method: str) -> None:
    _, _, engines, _ = run(tmp_path, [900, 900, 900], faults={0: (method, "dies")}, samples=3)
    assert not engines[0].alive and not any(engine.here or engine.rooms for engine in engines[1:])


def test_what_a_switch_costs_is_the_time_without_a_token(tmp_path: Path) -> None:
    """Not that in which samples were prepared to go, and ran on: else no node would switch a second time."""
    costs: list[float] = []

    class Noting(TpSwitcher):
        def _over(self, node: str, task: asyncio.Task[None]) -> None:
            super()._over(node, task)
            costs.append(self._cost.seconds(None, None, [100, 100]))

    async def main() -> None:
        downtimes = {0: 0.4, 1: 0.1}
        engines = {number: OnDevices(lambda method: "") for number in range(3)}
        for number, engine in engines.items():
            engine.number, engine.told = number, []
        keeper = SampleKeeper(engines, 0.001, spare=[2])
        reports = EngineReports(keeper, 0.02, print, PLAN.layouts())

        async def move(orders: Any, cause: str, hand_over: Any) -> list[Any]:
            await asyncio.sleep(0.2)
            names = [sample.name for sample, _ in orders]
            moves = [Move(name, 0, 2, KV_TRANSFER, KV_TRANSFER, phase=Phase.RUNNING, step=None) for name in names]
            return [MoveRecord(one, cause, 1.0, downtimes[int(one.sample)], 100, Choice(KV_TRANSFER)) for one in moves]

        mover: Any = SimpleNamespace(move_together=move)
        switcher = Noting(
            TpSwitchSettings(enable=True, samples=2), PLAN, keeper, reports, mover, print, lambda: 1, lambda: True
        )
        switcher.place(dict.fromkeys(engines, "here"))
        asked = SampleRequest((1,), SimpleNamespace(max_tokens=9, seed=None))
        tasks = [asyncio.create_task(keeper.generate(asked, number)) for number in (0, 1)]
        await asyncio.sleep(0.01)
        await reports.hear()
        switcher.look()
        while not costs:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    virtual_time.run(main(), 10)
    # Half of it is what was thought before.
    assert costs == [pytest.approx(2 * EACH_SECONDS / 2 + 0.4 / 2)]


def status(engine: int, seats: int, tokens: int, decode: DecodeMean | None = None, gained: float = 1.0) -> EngineStatus:
    return EngineStatus(engine, (), tokens, seats, 0, True, 1, 2048, tokens_per_step=gained, decode=decode)


def test_all_must_fit() -> None:
    assert has_room([100, 50, 10], [status(2, 2, 110), status(3, 1, 50)])
    assert not has_room([100, 50, 10], [status(2, 2, 109), status(3, 1, 50)])
    assert not has_room([100, 50, 10], [status(2, 1, 1000), status(3, 5, 1000)])


def test_a_look_lists_each_layouts_engines_once_however_many_nodes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, asked = 5, []
    plan = LayoutPlan(2 * nodes, 1, (Tail(nodes, 2),))
    kept: dict[int, list[Any]] = {engine: [] for engine in range(3 * nodes)}
    for engine in range(2 * nodes):
        request = SimpleNamespace(prompt=[1] * 9, history=None, parameters=SimpleNamespace(max_tokens=9000))
        kept[engine] = [SimpleNamespace(name=str(engine), engine=engine, place="", moving=False, known_tokens=500)]
        kept[engine][0].request = request
    keeper: Any = SimpleNamespace(engines={n: SimpleNamespace(alive=True) for n in kept}, samples=kept.__getitem__)
    fresh = EngineReports.fresh

    def counted(reports: EngineReports, layout: int = 0) -> list[EngineStatus]:
        asked.append(layout)
        return fresh(reports, layout)

    monkeypatch.setattr(EngineReports, "fresh", counted)

    async def look() -> dict[str, tuple[int, int]]:
        reports = EngineReports(keeper, 60.0, lambda text: None, plan.layouts())
        for layout, seconds in enumerate((0.01, 0.0001)):
            reports.install(profile(seconds), layout)
        reports.statuses = {n: status(n, 2, 5000) for n in kept}
        reports._heard = dict.fromkeys(kept, asyncio.get_running_loop().time())
        nothing: Any = None
        switcher = TpSwitcher(
            TpSwitchSettings(enable=True), plan, keeper, reports, nothing, nothing, lambda: 7, lambda: True
        )
        switcher.place({n: str(n // 2 if n < 2 * nodes else n - 2 * nodes) for n in kept})
        begun = {}

        def begin(node: str, work: Any) -> None:
            begun[node] = (work.cr_frame.f_locals["source"], work.cr_frame.f_locals["target"])
            work.close()

        monkeypatch.setattr(switcher, "_begin", begin)
        switcher.look()
        return begun

    # Much quicker tail engines: every node is switched.
    assert asyncio.run(look()) == {str(node): (0, 1) for node in range(nodes)}
    assert sorted(asked) == [0, 1]


# Two prompts are far longer than the other eight.
LENGTHS = [[9000, 9100], [500, 600], [510, 590], [520, 610], [9050, 8950], *[[480, 520]] * 5]


def first_engines(
    busy: bool = False, one_node: bool = False, seconds: tuple[float, ...] = (0.02, 0.005), **settings: Any
) -> Any:
    """Return the engines that prompts begin at, those that lend their devices, and those that were told so."""
    plan = LayoutPlan(4, 1, (Tail(2, 2),), both_awake=settings.pop("both_awake", True))

    async def main() -> Any:
        engines = {number: OnDevices(lambda method: "") for number in range(6)}
        for number, engine in engines.items():
            engine.number, engine.told = number, []
        keeper = SampleKeeper(engines, 0.001, spare=[4, 5])
        reports = EngineReports(keeper, 0.02, print, plan.layouts())
        for layout, each in enumerate(seconds):
            reports.install(profile(each), layout)
        asked, nothing = TpSwitchSettings(enable=True, **settings), Any
        switcher = TpSwitcher(asked, plan, keeper, reports, nothing, print, lambda: 1, lambda: True)  # type: ignore[arg-type]
        switcher.place({n: "b" if n in (2, 3, 5) and not one_node else "a" for n in engines})
        request = SampleRequest((1,), SimpleNamespace(max_tokens=9000, seed=None))
        running = [asyncio.create_task(keeper.generate(request, 0))] if busy else []
        await asyncio.sleep(0.01)
        found = await switcher.first_engines(LENGTHS, 2)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return found, reports.lent, {number for number, engine in engines.items() if engine.told == ["lend_devices"]}

    return virtual_time.run(main(), 10)


def test_the_longest_prompts_of_a_step_begin_at_a_nodes_tail_engine() -> None:
    found, lent, told = first_engines()
    assert [place for place, engine in enumerate(found) if engine == 5] == [0, 4]
    assert set(found) == {0, 1, 5} and lent == told == {2, 3}


@pytest.mark.parametrize(
    "change",
    [{"rule": "maximum"}, {"samples": 2}, {"both_awake": False}, {"busy": True}, {"one_node": True},
     {"seconds": (0.02,)}, {"seconds": (0.02, 0.03)}],
)  # fmt: skip
def test_otherwise_all_nodes_begin_a_step_alike(change: dict[str, Any]) -> None:
    assert first_engines(**change) == (None, frozenset(), set())


@pytest.mark.parametrize("refusal", [NotYet, MoveRefused])
def test_a_move_that_may_begin_later_is_asked_for_again(refusal: type[MoveRefused]) -> None:
    """An engine may have taken weights since it reported; any other refusal is told, and its sample left alone."""
    told: list[str] = []
    switcher = TpSwitcher.__new__(TpSwitcher)
    switcher._reports, switcher._stuck = SimpleNamespace(tell=told.append), set()  # type: ignore[assignment]
    assert switcher._moved(SimpleNamespace(name="7"), refusal("engine 1 has other weights")) is None  # type: ignore[arg-type]
    assert (switcher._stuck, bool(told)) == ((set(), False) if refusal is NotYet else ({"7"}, True))
