"""The words for an event in its row."""

from rhyme_openrlhf.webui.run.event_words import LENGTH, level_of, sentence


def test_sentences() -> None:
    assert sentence("note", {"level": "info", "text": "engines\n are  up"}) == "engines are up"
    assert sentence("run_finished", {"status": "failed", "message": "out of memory"}) == "failed: out of memory"
    assert sentence("run_finished", {"status": "succeeded", "message": ""}) == "succeeded"
    assert sentence("process_ready", {"name": "engine 1"}) == "engine 1 is ready"
    assert (
        sentence("process_died", {"name": "engine 1", "cause": "killed", "healed": True})
        == "engine 1: killed (replaced)"
    )
    body = {"step": 4, "epoch": 1, "seconds": 3.21987, "metrics": {"kl": 1.0}, "good": True, "path": "a/b"}
    assert sentence("anything", body) == "epoch 1, seconds 3.22, kl 1, good yes, path a/b"
    assert sentence("anything", {}) == ""
    assert (
        sentence("anything", {"values": [0, 1], "samples": [90, 6.5], "log": ["x"]})
        == "values 0 / 1, samples 90 / 6.50"
    )
    interval = {"engine": 1, "state": "idle", "start": 10.0, "end": 12.5, "step": 3, "cause": "tail"}
    assert sentence("engine_interval", interval) == "engine 1: idle 2.5 s, cause tail"
    assert len(sentence("note", {"text": "x" * 1000})) == LENGTH


def test_levels() -> None:
    assert level_of("note", {"level": "warning"}) == "warning"
    assert level_of("note", {"level": "info"}) == "" and level_of("note", {"level": "<b>"}) == ""
    assert level_of("process_died", {}) == "error" and level_of("run_finished", {"status": "failed"}) == "error"
    assert level_of("run_finished", {"status": "stopped"}) == ""
