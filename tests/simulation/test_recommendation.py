"""The settings to use: of the quickest run that can be run."""

from __future__ import annotations

from rhyme_openrlhf.simulation.recommendation import flags, recommend, refused
from rhyme_openrlhf.simulation.result import Result, StepTimesOf
from rhyme_openrlhf.simulation.settings import Cluster, Features
from rhyme_openrlhf.simulation.study import Variant

CLUSTER = Cluster(nodes=2, devices=4)
FILES = {1: "one.json", 2: "two.json", 4: "four.json"}


def result(seconds: float) -> Result:
    return Result([StepTimesOf(1, 100, 1000, trained=seconds)])


def variant(name: str, features: Features) -> Variant:
    return Variant(name, CLUSTER, features)


def test_the_quickest_that_can_be_run_is_recommended() -> None:
    variants = [
        variant("base", Features()),
        variant("both", Features("pipeline", reallocation=True)),
        variant("pipe", Features("pipeline", two_tier=True, outliers=True)),
    ]
    advice = recommend(variants, [result(9.0), result(5.0), result(7.0)], FILES)
    assert advice.name == "pipe"
    assert "--histopipe.enable" in advice.flags and "--move.enable" in advice.flags
    assert advice.flags[:2] == ("--vllm.num_engines", "8")
    assert advice.lines()[0].startswith("settings to use (simulated, pipe): rhyme train ... --vllm.num_engines 8")
    assert "both is simulated only" in advice.lines()[1]


def test_nothing_is_recommended_where_nothing_can_be_run() -> None:
    advice = recommend([variant("a", Features(switching="history"))], [result(1.0)], FILES)
    assert advice.flags == () and "--tp_switch.enable with --train.async_enable" in advice.lines()[0]


def test_what_is_no_option_is_said() -> None:
    advice = recommend([variant("a", Features("pipeline", outliers=True, alpha=0.2))], [result(1.0)], FILES)
    assert advice.flags and "alpha 0.1 and beta 1.1" in advice.lines()[1]


def test_flags_name_each_feature() -> None:
    chosen = flags(CLUSTER, Features("sync", dispatch=True, reallocation=True, switching="maximum"), FILES)
    text = " ".join(chosen)
    assert "--train.async_enable" not in text and "--dispatch.by_history" in text and "--no-histospec.enable" in text
    assert (
        "--tp_switch.sizes 2,4 --tp_switch.rule maximum --tp_switch.profile two.json,four.json" in text
        and "--reallocation.status_s 5" in text
    )
    assert chosen[-2:] == ("--latency.profile", "one.json")
    assert not refused(Features("sync", reallocation=True, switching="history"))
    one = " ".join(flags(CLUSTER, Features("sync", switching="history"), {1: "one.json", 2: "two.json"}))
    assert "--tp_switch.size 2 --tp_switch.rule history --tp_switch.profile two.json" in one
